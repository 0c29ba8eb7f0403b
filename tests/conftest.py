"""Baked projects, as `cookiecutter` makes them from a fresh clone."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import slurm_nodes
import tiers
from cookiecutter.main import cookiecutter

REPO = Path(__file__).resolve().parents[1]
LAST_WITH_A_COPY = "917aeca"  # the last commit of the template that had the library in the project

# Beside the sources bytecode would differ between bakes, and without it each process would compile hpc anew.
os.environ["PYTHONPYCACHEPREFIX"] = str(REPO / "build" / "pycache")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["HPC_ML_FOLDER"] = str(REPO)  # projects use the library as it is here, which is installed

# Valid answers that break every place where quoting is missing.
AWKWARD = {
    "project_name": """Über "x" \\ $(touch canary) `touch canary`; touch canary # 'q' 100 % <b> 😀""",
    "project_slug": "wild-2_thing",
    "package_name": "wild_2_thing",
    "description": '''"""It's: - {a} \\n [b] & "c" \\''',
    "author": 'Ada "The Countess" O\'Łoś \\ <ada@example.org>',
    "license": "LicenseRef-Our-Own",
    "account": "p_1234@a+b.c-d",
}


@pytest.fixture(scope="session")
def last_with_a_copy() -> str:
    """Return that commit, if this clone has it."""
    if subprocess.run(["git", "cat-file", "-e", LAST_WITH_A_COPY], cwd=REPO, capture_output=True).returncode:
        pytest.skip(f"this clone has no commit {LAST_WITH_A_COPY}: git fetch --unshallow")
    return LAST_WITH_A_COPY


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    """Copy the template as a fresh clone has it: in git, without caches and other files that git ignores."""
    copy = tmp_path_factory.mktemp("clone") / "hpc-ml-template"
    git = ["git", "-C", str(REPO), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPO / name).is_file():  # not deleted since the last commit
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, copy / name)
    commit(copy)
    return copy


def commit(folder: Path, message: str = "all") -> str:
    """Commit all files of a folder to git, which the first time makes a repository of it. Return the commit."""
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "--quiet"], ["add", "--all"], [*identity, "commit", "--quiet", "--message", message]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="session")
def settings(tmp_path_factory) -> Path:
    """Write a cookiecutter configuration whose folders are outside the home directory."""
    folder = tmp_path_factory.mktemp("cookiecutter")
    file = folder / "config.yaml"
    file.write_text(f"replay_dir: '{folder}/replay'\ncookiecutters_dir: '{folder}/clones'\n")
    return file


@pytest.fixture(scope="session")
def bake(template: Path, settings: Path, tmp_path_factory) -> Callable[..., Path]:
    """Return the function bake(output_dir, **answers), which returns the project's folder."""

    def bake(output_dir: Path | None = None, **answers: str) -> Path:
        output_dir = output_dir or tmp_path_factory.mktemp("baked")
        project = cookiecutter(
            str(template), no_input=True, extra_context=answers, output_dir=str(output_dir), config_file=str(settings)
        )
        return Path(project)

    return bake


@pytest.fixture(scope="session")
def project(bake) -> Path:
    """Bake a project with the default answers."""
    return bake()


@pytest.fixture(scope="session")
def awkward_project(bake, tmp_path_factory) -> Path:
    """Bake a project with awkward answers, in a folder with an awkward name."""
    return bake(tmp_path_factory.mktemp("Ein Ordner für 'alles' ", numbered=False), **AWKWARD)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[slurm_nodes.Slurm]:
    """Start a Slurm cluster of four nodes that run jobs."""
    if reason := slurm_nodes.missing():
        pytest.skip(reason)
    with slurm_nodes.cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Callable[..., subprocess.CompletedProcess]:
    """Return the function run(command, cwd). In the command, `python` is the interpreter that runs the tests."""

    def run(
        command: list[str] | str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 600
    ) -> subprocess.CompletedProcess:
        shell = ["bash", "-c", command] if isinstance(command, str) else command
        return subprocess.run(
            shell,
            cwd=cwd,
            env=environment() | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    return run


def library_requirements() -> list[str]:
    """Return the requirements of the library, in the order and the form of an installation's metadata."""
    table = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [f"{text}; extra == '{name}'" for name, texts in table["optional-dependencies"].items() for text in texts]
    return [*table["dependencies"], *extras]


def environment() -> dict[str, str]:
    """Return the tests' environment without pytest's variables, and with the tests' `python` on its PATH."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    kept.pop("VIRTUAL_ENV", None)  # as if env.sh had not been sourced
    return kept | {"VENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


NOTES: list[str] = []  # reports of a baked project's tests, printed at the end of this run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark_long(items)


def pytest_terminal_summary(terminalreporter) -> None:
    for line in NOTES:
        terminalreporter.write_line(line)
