"""Check that a start with torch or lightning outside the ranges of the library is rejected with one sentence."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fork import ENVIRON, PROJECT

from hpc.config import library, versions
from hpc.config.errors import ConfigError
from hpc.config.versions import InstalledPackage


def install(folder: Path, name: str, version: str) -> None:
    """Put a package of this name and version into a folder: what is read of it, and a module that ends the import."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / f"{name}.py").write_text('raise SystemExit("imported")\n')


def start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROJECT / "train.py"), f"run_dir={folder / 'run'}", *words]
    environ = ENVIRON | {"PYTHONPATH": str(folder / "site")}
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.9.1"), ("torch", "2.16.0"), ("torch", "2.14.0a0+nv26.10"), ("torch", "git"), ("lightning", "2.5.6")],
)
def test_another_version_is_rejected_before_it_is_imported(name: str, version: str, tmp_path: Path) -> None:
    install(tmp_path / "site", name, version)
    done = start(tmp_path)
    ranges = {"torch": ">=2.10,<2.14", "lightning": ">=2.6.6,<2.7,!=2.6.2,!=2.6.3"}
    where = f"hpc-ml, but the one in {tmp_path / 'site'} is not"
    sentence = f"ConfigError: {name} must be in the range {ranges[name]} of {where}; got {version}."
    assert (done.returncode, done.stdout, done.stderr.splitlines()[0]) == (2, "", sentence)
    assert done.stderr.splitlines()[1:] == [f"  Try: {versions.FIX_VERSION}"]
    assert not (tmp_path / "run").exists()


def test_an_answer_that_trains_nothing_needs_no_version(tmp_path: Path) -> None:
    install(tmp_path / "site", "torch", "2.9.1")
    assert start(tmp_path, "--cfg", "job").returncode == 0


def test_a_supported_version_is_imported(tmp_path: Path) -> None:
    install(tmp_path / "site", "torch", "2.12.0+computecanada")
    assert start(tmp_path).stderr.splitlines()[-1] == "imported"


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cu126", "2.13.7", "2.10.0a0+b4e4ee8.nv25.12", "2.11.0.post1"])
def test_builds_of_a_supported_release_are_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = InstalledPackage("torch", version, "/site", ">=2.10,<2.14")
    assert package.is_supported()
    monkeypatch.setitem(sys.modules, "packaging.specifiers", None)  # as where pip alone is installed
    assert package.is_supported()


@pytest.mark.parametrize("version", ["2.7.4.post1", "2.13.0+cu126", "0.5.0rc1", "1!2.0"])
def test_an_exact_version_is_in_its_range(version: str) -> None:
    assert InstalledPackage("own", version, "/site", f"=={version}").is_supported()
    assert not InstalledPackage("own", "1.0", "/site", f"=={version}").is_supported()


def test_ranges_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Check whoever knows better and has a copy of the library in src/ with another range."""
    monkeypatch.setattr(versions, "PROJECT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    monkeypatch.setattr(library, "read_requirements", lambda: [])
    versions.reject_unsupported_packages()
    metadata = ["torchmetrics<1", "torch-fidelity<1", 'torch[opt] >= 2, <3 ; python_version > "3"']
    monkeypatch.setattr(library, "read_requirements", lambda: metadata)
    torch = versions.installed_package("torch")
    assert torch and torch.supported == ">=2,<3"
    monkeypatch.setattr(library, "read_requirements", lambda: ["torch<2"])
    with pytest.raises(ConfigError, match="torch must be in the range <2 of hpc-ml"):
        versions.reject_unsupported_packages()


def test_extras_are_those_that_the_pin_names_and_the_projects_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(versions, "PROJECT", tmp_path)
    pin = "hpc-ml[deepspeed, search] @ git+https://example.org/t@abc"
    table = f"dependencies = ['{pin}', 'einops>=0.8']\noptional-dependencies.dev = ['pytest']\n"
    (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'x'\n{table}")
    extras = [f"{name}>=1; extra == '{name}'" for name in ("deepspeed", "search", "wandb")]
    monkeypatch.setattr(library, "read_requirements", lambda: ["torch<3", *extras])
    assert versions.requirements_to_install() == ["torch<3", "deepspeed>=1", "search>=1", "einops>=0.8", "pytest"]
    assert versions.read_extra("wandb") == ["wandb"]


def test_the_versions_that_are_pinned_and_tested_are_supported() -> None:
    assert versions.unsupported_packages() == []
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\S+)$", (PROJECT / "constraints.txt").read_text(encoding="utf-8")))
    for name in versions.CHECKED:
        installed = versions.installed_package(name)
        assert installed and installed.version.partition("+")[0] == pins[name]
