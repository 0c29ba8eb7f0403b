"""The project that this package lies in: its folders, its name, and the packages beside this one."""

import sys
import tomllib
from functools import cache
from pathlib import Path

# Not resolved: where `hpc` is a link, the project is the one that the link lies in.
SOURCES = Path(__file__).absolute().parents[2]
PROJECT = SOURCES.parent
CONFIGS = PROJECT / "configs"
HPC = __name__.partition(".")[0]  # the name of this package
SHIPPED_CLUSTERS = Path("src", HPC, "jobs", "cluster")  # in a project


@cache
def researcher_packages() -> tuple[str, ...]:
    """Return the names of the researcher's packages, and modules of one file, which lie beside this package."""
    files = {path.stem for path in SOURCES.glob("*.py")}
    folders = {path.parent.name for path in SOURCES.glob("*/__init__.py")} - {HPC}
    return tuple(sorted(name for name in files | folders if name.isidentifier()))


def is_project_code(module: str) -> bool:
    """Return whether a module, or a name in it, belongs to this package or to one beside it."""
    return module.partition(".")[0] in (HPC, *researcher_packages())


def project_name() -> str:
    """Return the project's name, as pyproject.toml has it. It names what is kept for the project elsewhere."""
    with (PROJECT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["name"]


def shipped_clusters(configs: Path) -> Path:
    """Return the folder of clusters that lies in the same project as `configs`; where it has none, this project's."""
    beside = configs.parent / SHIPPED_CLUSTERS
    return beside if beside.is_dir() else SOURCES.parent / SHIPPED_CLUSTERS


def require_same_project(file: str) -> None:
    """Raise `ImportError` unless the package whose `__init__.py` is `file` lies beside this one, in its project.

    Two projects that are installed into one environment would otherwise share the `hpc` of one of them.
    """
    package = Path(file).absolute().parent
    if package.parent.resolve() != SOURCES.resolve():
        raise ImportError(
            f"{package.name} in {package.parent} must be used with the hpc package that lies beside it; Python has "
            f"imported the one in {SOURCES}, of another project.\n"
            f"Try: PYTHONPATH={package.parent} {Path(sys.executable).name} ..."
        )
    if not (PROJECT / "pyproject.toml").is_file():
        raise ImportError(
            f"{package.name} and hpc must lie in src/ of their project, beside its configs; they lie in {SOURCES}, "
            "where the next project to be installed would replace hpc by its own.\n"
            "Try: pip uninstall the project, then pip install -e <its folder>, or PYTHONPATH=<its folder>/src"
        )
