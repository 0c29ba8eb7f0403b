"""Check which library a program uses: the pinned one, a person's copy in src/, and the copy of a job."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from fork import ENVIRON, PROJECT, REPO

from hpc import version
from hpc.config import library
from hpc.config.errors import ConfigError
from hpc.run import snapshot

SOURCES = REPO / "src" / "hpc"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PROJECT, tmp_path / "project", symlinks=True))


def copy_library(project: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__")
    return Path(shutil.copytree(SOURCES, project / "src" / "hpc", ignore=ignore))


def help_of_train(project: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "train.py", "--help"]
    environ = ENVIRON | {"PYTHONDONTWRITEBYTECODE": "1"} | environ
    return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=60)


def rejected(project: Path, **environ: str) -> str:
    done = help_of_train(project, **environ)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def edit(file: Path, pattern: str, text: str) -> None:
    file.write_text(re.sub(pattern, text, file.read_text()))


# -- In src/ --


def test_bytecode_that_an_update_leaves_is_ignored(project: Path) -> None:
    (project / "src" / "hpc" / "run" / "__pycache__").mkdir(parents=True)
    assert help_of_train(project).returncode == 0


def test_a_whole_copy_comes_first(project: Path) -> None:
    copy = copy_library(project)
    edit(copy / "run" / "command_line.py", r"(?m)^import", "print('mine')\nimport")
    done = help_of_train(project)
    assert done.returncode == 0 and done.stdout.startswith("mine\n"), done.stderr


LEFT = [["run/stacks.py"], ["jobs/slurm.bash"], ["jobs/hardware.yaml"], ["__init__.py"]]


@pytest.mark.parametrize("left", [*LEFT, ["__init__.py", "run/__init__.py", "run/interpreter.py"]])
def test_what_an_update_leaves_of_an_edited_copy_is_rejected(left: list[str], project: Path) -> None:
    copy = copy_library(project)
    for file in copy.rglob("*"):
        if file.is_file() and str(file.relative_to(copy)) not in left:
            file.unlink()
    assert f"{copy} is not a whole copy of the library: " in rejected(project)


def test_a_copy_may_have_more_than_the_library(project: Path) -> None:
    copy = copy_library(project)
    (copy / "jobs" / "lsf").mkdir()
    (copy / "jobs" / "lsf" / "__init__.py").touch()
    (copy / "jobs" / "more.py").write_text("from hpc.jobs import lsf\n")
    assert help_of_train(project).returncode == 0


@pytest.mark.parametrize("name", ["run/history.py", "jobs/slurm.bash", "config/sections.py"])
def test_a_copy_that_lacks_a_file_is_rejected(name: str, project: Path) -> None:
    (copy_library(project) / name).unlink()
    assert f"is not a whole copy of the library: it lacks {name}" in rejected(project)


def test_a_copy_with_its_metadata_has_ranges_of_its_own(project: Path) -> None:
    copy_library(project)
    info = project / "src" / "hpc_ml-0.3.0+mine.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        re.sub("(?m)^Requires-Dist: torch>=.*", "Requires-Dist: torch<2", library.read_metadata())
    )
    command = [sys.executable, "train.py", "trainer.fast_dev_run=true"]
    done = subprocess.run(command, cwd=project, env=ENVIRON, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "torch must be in the range <2 of hpc-ml" in done.stderr


# -- What is pinned --


def test_another_interface_is_told(project: Path) -> None:
    edit(project / "env.py", "INTERFACE = .*", "INTERFACE = 99")
    said = rejected(project)
    assert "these programs use interface 99 of the library, and the one in" in said and "source env.sh" in said


@pytest.mark.parametrize("pin", ["git+https://example.org/template@" + "1" * 40, "file:///elsewhere"])
def test_another_library_than_the_pinned_one_is_told_but_not_of_a_copy(pin: str, project: Path) -> None:
    edit(project / "pyproject.toml", r'(hpc-ml\[.*\] @ )[^"]+', rf"\g<1>{pin}")
    for environ in ({}, {"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7"}):
        assert f"and pyproject.toml pins {pin}" in rejected(project, **environ)
    copy_library(project)
    assert help_of_train(project).returncode == 0


def test_a_script_that_a_person_submits_runs_the_pinned_library(project: Path, tmp_path: Path) -> None:
    """Let another project have replaced it in an environment that both share, while the script was queued."""
    edit(project / "pyproject.toml", r'(hpc-ml\[.*\] @ )[^"]+', rf"\g<1>git+https://example.org/template@{'1' * 40}")
    command = [sys.executable, "-sPm", "hpc.run.snapshot", str(tmp_path)]
    environ = ENVIRON | {"HPC_PROJECT": str(project)}
    done = subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "hpc must be the pinned one, but hpc-ml is" in done.stderr, done.stderr
    assert "Try: source env.sh on a login node" in done.stderr and not (tmp_path / "code").exists()


# -- With the code of a job --


def test_the_copy_of_a_job_has_the_library_as_it_is_now(tmp_path: Path) -> None:
    """Check the copy of a clone, whose installation has the version and requirements of an earlier day."""
    snapshot._copy_library(tmp_path)
    for file in SOURCES.rglob("*.py"):
        assert (tmp_path / "hpc" / file.relative_to(SOURCES)).read_bytes() == file.read_bytes()
    (info,) = tmp_path.glob("hpc_ml-*.dist-info")
    metadata = PathDistribution(info)
    assert metadata.version == version.source_version() == info.name.removeprefix("hpc_ml-").removesuffix(".dist-info")
    table = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert metadata.requires and [text for text in metadata.requires if ";" not in text] == table["dependencies"]
    assert "optuna>=5.0; extra == 'search'" in metadata.requires
    assert library.read_requirements(tmp_path) == metadata.requires


def test_a_library_that_is_replaced_while_it_is_copied_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip have removed a file, as where two projects share an environment."""
    (Path(shutil.copytree(SOURCES, tmp_path / "hpc")) / "run" / "history.py").unlink()
    monkeypatch.setattr(snapshot, "LIBRARY", tmp_path / "hpc")
    with pytest.raises(ConfigError, match=r"must not change while it is copied, but now lacks run/history\.py"):
        snapshot._copy_library(tmp_path / "code")


def test_a_persons_copy_goes_with_the_job_and_is_noted(project: Path, tmp_path: Path) -> None:
    copy = copy_library(project)
    (copy / "mine.py").touch()
    command = [sys.executable, "-c", "import sys; from pathlib import Path; from hpc.run import snapshot as s; "]
    command[-1] += "s.copy_code(Path(sys.argv[1]))"
    (tmp_path / "run").mkdir()
    environ = ENVIRON | {"PYTHONPATH": str(project / "src"), "HPC_PROJECT": str(project)}
    subprocess.run([*command, str(tmp_path / "run")], cwd=project, env=environ, check=True, timeout=120)
    assert (tmp_path / "run" / "code" / "src" / "hpc" / "mine.py").exists()
    made_by = json.loads((tmp_path / "run" / "made_by.json").read_text())
    assert made_by["hpc_origin"] == "a copy in src/" and made_by["hpc"].startswith(version.RELEASE)


def test_a_version_has_the_commit_and_what_is_uncommitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("src/hpc/version.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    monkeypatch.setattr(version, "ROOT", tmp_path)
    assert version.source_version() == f"{version.RELEASE}+unknown"
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "one"], ["tag", f"v{version.RELEASE}"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout.strip()
    assert version.source_version() == f"{version.RELEASE}+g{head}", "at a tag, too"
    (tmp_path / "src" / "hpc" / "version.py").write_text("")
    assert version.source_version() == f"{version.RELEASE}+g{head}.dirty"
    monkeypatch.setenv("PATH", "/nowhere")
    assert version.source_version() == f"{version.RELEASE}+unknown"
