"""The packages that a project needs: those of this library, and its own, which its pyproject.toml names.

Imports neither of them, and only the standard library before a version is compared: the installation uses this, too.
"""

import re
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import chain
from pathlib import Path
from typing import Any

from hpc.config import library
from hpc.config.project import LIBRARY, PROJECT

CHECKED = ("torch", "lightning")
# For the torch of a site. The library's dist-info has its requirements.
FIX_SITE_VERSION = (
    "load another module; or, if this version works for you, copy hpc and hpc_ml-*.dist-info from site-packages into "
    "src/, and change Requires-Dist in METADATA there"
)
FIX_VERSION = f"python -m pip install -c constraints.txt torch lightning; with VERSIONS=site, {FIX_SITE_VERSION}"


@dataclass(frozen=True)
class InstalledPackage:
    """A package that this Python would import.

    Attributes:
        folder: where it lies.
        supported: the range of versions, such as ">=2.10,<2.14"; "" for any version.
    """

    name: str
    version: str
    folder: str
    supported: str

    @property
    def rule(self) -> str:
        """The range in which the version must be, as a rule of a `ConfigError`."""
        return f"must be in the range {self.supported} of {library.DISTRIBUTION}, but the one in {self.folder} is not"

    def is_supported(self) -> bool:
        """Return whether the release is in the range: 2.13.0+cu126 and 2.13.0a0+nv25.12 are builds of 2.13.0."""
        return _is_in_range(self.version, self.supported)


def _is_in_range(installed: str, supported: str) -> bool:
    """Return whether a version, or its release, is in a range: 2.13.0a0+nv25.12 is a build of 2.13.0."""
    versions = [installed, *re.findall(r"^(?:\d+!)?\d+(?:\.\d+)*", installed)]
    specifiers = _import_packaging("specifiers").SpecifierSet(supported)
    with suppress(ValueError):  # packaging's InvalidVersion
        return any(specifiers.contains(version, prereleases=True) for version in reversed(versions))
    return False


def _import_packaging(name: str) -> Any:
    try:
        return import_module(f"packaging.{name}")
    except ImportError:  # in an environment that has only pip yet
        return import_module(f"pip._vendor.packaging.{name}")


def requirements_to_install() -> list[str]:
    """Return all that env.sh installs: what this library and the project need, with the project's own extras.

    Of the extras of the library, those that the project's pin names.
    """
    table = _read_project_table(PROJECT)
    pin, own = _split_pin(table)
    of_library = _select_requirements(library.read_requirements(), _parse(pin).extras if pin else ())
    return [*of_library, *own, *chain(*table.get("optional-dependencies", {}).values())]


def read_extra(name: str) -> list[str]:
    """Return the names of the packages of an extra of the library, which are installed on request."""
    requirements = library.read_requirements()
    always = _select_requirements(requirements)
    return [_parse(text).name for text in _select_requirements(requirements, [name]) if text not in always]


def unmet_requirements(code: Path) -> list[str]:
    """Return the requirements of a project, and of its copy of the library, that this Python does not meet.

    Extras are left out, as not every run needs them.

    Args:
        code: the project, or the copy of a job.

    Returns:
        such as ["einops>=0.8"].
    """
    _, own = _split_pin(_read_project_table(code))
    sources = code / "src" if (code / "src" / "hpc").is_dir() else LIBRARY.parent
    needed = _select_requirements([*library.read_requirements(sources), *own])
    return [text for text in needed if not _is_requirement_met(text)]


def _is_requirement_met(text: str) -> bool:
    requirement = _parse(text)
    try:
        return _is_in_range(version(requirement.name), str(requirement.specifier))
    except PackageNotFoundError:
        return False


def _read_project_table(code: Path) -> dict[str, Any]:
    with (code / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def _split_pin(table: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the requirement of this library, "" if there is none, and the project's other requirements."""
    texts = table.get("dependencies", [])
    own = [text for text in texts if not is_requirement_of(text, library.DISTRIBUTION)]
    return next((text for text in texts if text not in own), ""), own


def _parse(requirement: str) -> Any:
    return _import_packaging("requirements").Requirement(requirement)


def _select_requirements(requirements: Iterable[str], extras: Iterable[str] = ()) -> list[str]:
    """Return the requirements that hold for this Python and with these extras, without their markers."""
    selected = []
    for text in requirements:
        marker = _parse(text).marker
        if not marker or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            selected.append(text.partition(";")[0].strip() if marker else text)
    return selected


def is_requirement_of(requirement: str, package: str) -> bool:
    """Return whether a requirement such as "torch>=2.10,<2.14" is one of this package."""
    return _parse(requirement).name == package


def installed_package(name: str) -> InstalledPackage | None:
    """Return the package of this name that this Python would import; None if there is none."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return None
    specifiers = [_parse(text).specifier for text in requirements_to_install() if is_requirement_of(text, name)]
    parts = sorted(chain(*specifiers), key=lambda part: (-ord(part.operator[0]), part.version))  # >=2.10,<2.14,!=2.11
    return InstalledPackage(name, package.version, str(package.locate_file("")), ",".join(map(str, parts)))


def unsupported_packages(names: tuple[str, ...] = CHECKED) -> list[InstalledPackage]:
    """Return those packages whose installed version is outside the range of the library."""
    packages = [installed_package(name) for name in names]
    return [package for package in packages if package and not package.is_supported()]


def reject_unsupported_packages() -> None:
    """Raise `ConfigError` if this Python has torch or lightning in a version that is not supported."""
    from hpc.config.errors import ConfigError  # only here: an installation begins without its libraries

    for package in unsupported_packages():
        raise ConfigError(package.name, package.version, package.rule, FIX_VERSION)
