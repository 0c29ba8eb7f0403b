"""This library as it is imported: its version, its requirements, and where it comes from. Standard library only.

It is installed, or lies in a clone (an editable installation), or was copied: into a project's src/ by a person who
changes it, or with the code of a job. A copy of a job has the metadata of an installation beside it.
"""

import re
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote

from hpc import version
from hpc.config.project import LIBRARY, PROJECT, SOURCES

DISTRIBUTION = "hpc-ml"


@cache
def read_metadata(sources: Path = LIBRARY.parent) -> str:
    """Return the metadata of the library in a folder, in the form of an installation's METADATA.

    Args:
        sources: the folder that the package lies in.
    """
    for file in sorted(sources.glob("hpc_ml-*.dist-info/METADATA")):
        return file.read_text(encoding="utf-8")
    if table := _read_clone(sources.parent):  # as it is now: an editable installation has what it was then
        requirements = list(table["dependencies"])
        for extra, packages in table["optional-dependencies"].items():
            requirements += [f"{package}; extra == '{extra}'" for package in packages]
        return _to_metadata(version.source_version(), requirements)
    try:  # a person's copy
        installed = distribution(DISTRIBUTION).requires or []
    except PackageNotFoundError:
        installed = []
    return _to_metadata(f"{version.RELEASE}+unknown", installed)


def library_version() -> str:
    """Return the version of the library, with the commit: 0.3.0+gCOMMIT."""
    return re.findall(r"(?m)^Version: (.+)$", read_metadata())[0]


def read_requirements(sources: Path = LIBRARY.parent) -> list[str]:
    """Return the requirements of the library in a folder; those of extras as optuna; extra == 'search'."""
    return re.findall(r"(?m)^Requires-Dist: (.+)$", read_metadata(sources))


def differs_from_pin() -> str:
    """Return how this library differs from the one that the project's pyproject.toml pins; "" if it does not.

    A library in src/ is never compared: it is a person's own, or of a job, which runs although the pin has changed.
    """
    if SOURCES in LIBRARY.parents:
        return ""
    try:
        pin = read_pin(PROJECT)
    except (tomllib.TOMLDecodeError, KeyError) as error:
        return f"{PROJECT}/pyproject.toml cannot be read: {error}"
    if pin.startswith("file:"):
        is_pinned = (folder_from_pin(pin) / "src").exists() and (folder_from_pin(pin) / "src").samefile(LIBRARY.parent)
    else:
        is_pinned = library_version().partition("+g")[2] == pin.rpartition("@")[2] != ""
    installed = f"hpc-ml is {library_version()} in {LIBRARY.parent}"
    return "" if is_pinned else f"{installed}, and pyproject.toml pins {pin or 'none'}"


def read_pin(code: Path) -> str:
    """Return the address of the library in a project's pyproject.toml, as git+https://host/t@COMMIT; "" if none."""
    with (code / "pyproject.toml").open("rb") as file:
        requirements = tomllib.load(file)["project"].get("dependencies", [])
    pins = [text.partition("@")[2].strip() for text in requirements if re.match(rf"{DISTRIBUTION}\b", text)]
    return pins[0] if pins else ""


def folder_from_pin(pin: str) -> Path:
    """Return the folder of a pin such as file:///a%20folder."""
    return Path(unquote(pin.removeprefix("file://")))


def is_clone() -> bool:
    """Return whether the library is used where it is developed, as it is there."""
    return _read_clone(LIBRARY.parents[1]) is not None


def describe_origin() -> str:
    """Return in words where this library comes from."""
    if SOURCES in LIBRARY.parents:
        return "a copy in src/" if not _is_job_copy() else "the copy of this job"
    return f"the clone {LIBRARY.parents[1]}" if is_clone() else "installed"


def _is_job_copy() -> bool:
    return PROJECT.name == "code" and (PROJECT.parent / "made_by.json").is_file()


def _read_clone(root: Path) -> dict | None:
    """Return the table [project] of the library's own pyproject.toml; None if this folder is no clone of it."""
    try:
        table = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, KeyError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return None
    return table if table.get("name") == DISTRIBUTION else None


def _to_metadata(version_text: str, requirements: list[str]) -> str:
    lines = ["Metadata-Version: 2.4", f"Name: {DISTRIBUTION}", f"Version: {version_text}"]
    return "\n".join([*lines, *(f"Requires-Dist: {requirement}" for requirement in requirements), ""])
