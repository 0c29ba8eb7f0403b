"""The project whose program runs: its folders, its name, and its packages. And where this library lies."""

import os
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

VARIABLE = "HPC_PROJECT"  # tells child processes the project; never exported to a job
TRAIN = Path("configs", "train.yaml")  # which every project has
LIBRARY = Path(__file__).absolute().parents[1]  # the folder of this package
HPC = LIBRARY.name


def find_project(program: str, *, working_folder: Path, named: str | None) -> Path:
    """Return the nearest folder with configs/train.yaml above the called program, else `named`, else one above here.

    Programs of the environment, such as pytest, belong to no project, even where the environment lies in one.

    Args:
        program: sys.argv[0], which may be a name without a file, such as "-c".
        named: the value of HPC_PROJECT.

    Raises:
        ImportError: there is none.
    """
    file = Path(program).resolve()
    is_own = file.is_file() and not _is_in_environment(file)
    if project := (is_own and _project_above(file.parent)) or (named and Path(named)) or _project_above(working_folder):
        return project
    raise ImportError(
        f"hpc must be used in a project, but no folder above {file if is_own else working_folder} has {TRAIN}.\n"
        "Try: call the train.py of a project, or go into its folder first"
    )


def _project_above(place: Path) -> Path | None:
    return next((folder for folder in (place, *place.parents) if (folder / TRAIN).is_file()), None)


def _is_in_environment(file: Path) -> bool:
    is_package = not {"site-packages", "dist-packages"}.isdisjoint(file.parts)
    folders = (Path(sys.executable).parent.resolve(), Path(os.__file__).parent.resolve(), LIBRARY)
    return is_package or any(file.is_relative_to(folder) for folder in folders)


PROJECT = find_project(sys.argv[0], working_folder=Path.cwd(), named=os.environ.get(VARIABLE))
SOURCES = PROJECT / "src"
CONFIGS = PROJECT / "configs"


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process that imports this library, for the same project."""
    folders = [str(SOURCES)]
    if not _is_in_environment(LIBRARY.parent):  # a clone, or the copy of a job: the same one for the child
        folders.append(str(LIBRARY.parent))
    path = os.pathsep.join(filter(None, [*folders, environ.get("PYTHONPATH")]))
    return {**environ, "PYTHONPATH": path, VARIABLE: str(PROJECT)}


@cache
def researcher_packages() -> tuple[str, ...]:
    """Return the names of the researcher's packages, and modules of one file, in src/."""
    files = {path.stem for path in SOURCES.glob("*.py")}
    folders = {path.parent.name for path in SOURCES.glob("*/__init__.py")} - {HPC}
    return tuple(sorted(name for name in files | folders if name.isidentifier()))


def is_project_code(module: str) -> bool:
    """Return whether a module, or a name in it, belongs to this library or to a package of the researcher."""
    return module.partition(".")[0] in (HPC, *researcher_packages())


def source_file(module: str) -> Path:
    """Return the file of a module of this library or of the researcher, whether there is one or not."""
    folder = LIBRARY.parent if module.partition(".")[0] == HPC else SOURCES
    path = folder.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def config_files() -> list[Path]:
    """Return the YAML files of the project's configs/."""
    return sorted(path for path in CONFIGS.rglob("*.yaml") if path.is_file())


def project_name() -> str:
    """Return the project's name, as pyproject.toml has it. It names what is kept for the project elsewhere."""
    with (PROJECT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["name"]
