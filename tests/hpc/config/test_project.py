"""Check that two projects in one environment never share one `hpc`."""

import subprocess
import sys
from pathlib import Path

import pytest
from fork import TEMPLATE

PACKAGES = ("alpha", "beta")


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two projects, each with its own package and its own `hpc`."""
    folders = []
    for name in PACKAGES:
        folder = tmp_path_factory.mktemp(name)
        (folder / "src" / name).mkdir(parents=True)
        beside = "from hpc.config.project import require_same_project\n\nrequire_same_project(__file__)\n"
        (folder / "src" / name / "__init__.py").write_text(beside)
        for file in (TEMPLATE / "src/hpc").rglob("*.py"):
            copy = folder / "src/hpc" / file.relative_to(TEMPLATE / "src/hpc")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
        build = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        where = '[tool.setuptools.packages.find]\nwhere = ["src"]\n'
        (folder / "pyproject.toml").write_text(f'{build}[project]\nname = "{name}"\nversion = "1"\n{where}')
        folders.append(folder)
    return folders


def imports(package: str, site_packages: Path) -> str:
    """Import a package in its own environment; return "" or the error."""
    code = f"import site, sys; site.addsitedir({str(site_packages)!r}); import {package}; print({package}.__file__)"
    command = [sys.executable, "-I", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr


def install(projects: list[Path], prefix: Path, *options: str) -> Path:
    """Install the projects into one environment with pip. Return its site-packages."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    for project in projects:
        command = [*pip, "--prefix", str(prefix), *options, str(project)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    return next(prefix.glob("lib/python*/site-packages"))


@pytest.mark.slow
def test_a_project_does_not_use_the_hpc_of_another_one(projects: list[Path], tmp_path: Path) -> None:
    site_packages = install(projects, tmp_path, "--editable")
    errors = {package: imports(package, site_packages) for package in PACKAGES}
    (owner,) = [package for package in PACKAGES if not errors[package]]
    other = next(package for package in PACKAGES if package != owner)
    source = projects[PACKAGES.index(other)] / "src"
    assert f"{other} in {source} must be used with the hpc package that lies beside it" in errors[other]
    assert f"Try: PYTHONPATH={source} " in errors[other]


@pytest.mark.soak
@pytest.mark.slow
def test_a_project_must_not_be_copied_into_an_environment(projects: list[Path], tmp_path: Path) -> None:
    site_packages = install(projects, tmp_path)
    for package in PACKAGES:
        assert "must lie in src/ of their project" in imports(package, site_packages)


def test_what_lies_beside_it_is_imported(projects: list[Path]) -> None:
    for package, project in zip(PACKAGES, projects, strict=True):
        assert imports(package, project / "src") == ""


def test_packages_and_single_files_beside_it_are_the_researchers(projects: list[Path]) -> None:
    (project, _), name = projects, PACKAGES[0]
    (project / "src" / "mine.py").touch()
    (project / "src" / "torch.old").mkdir()  # a backup: nobody imports it
    (project / "src" / "torch.old" / "__init__.py").touch()
    code = "from hpc.config import project; print(project.researcher_packages(), project.is_project_code('mine.Net'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project / "src", capture_output=True, text=True, check=True)
    assert done.stdout == f"{(name, 'mine')} True\n"
