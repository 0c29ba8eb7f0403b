"""The versions of torch and lightning that the project supports: the ranges in its pyproject.toml.

Imports neither of them, and only the standard library before a version is compared: the installation uses this, too.
"""

import re
import sys
import tomllib
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from itertools import chain
from pathlib import Path
from typing import Any

from hpc.config.project import PROJECT

PACKAGES = ("torch", "lightning")
ON_REQUEST = ("huggingface", "mlflow", "wandb")  # extras that the installation leaves out
OTHER_VERSION = "load another module, or change the range in pyproject.toml if this version works for you"
FIX = f"source env.sh, {OTHER_VERSION}"


@dataclass(frozen=True)
class InstalledPackage:
    """A package that this Python would import.

    Attributes:
        folder: where it lies.
        supported: the range of versions in pyproject.toml, such as ">=2.10,<2.14"; "" for any version.
    """

    name: str
    version: str
    folder: str
    supported: str

    @property
    def rule(self) -> str:
        """The range in which the version must be, as a rule of a `ConfigError`."""
        return f"must be in the range {self.supported} of pyproject.toml, but the one in {self.folder} is not"

    def is_supported(self) -> bool:
        """Return whether the release is in the range: 2.13.0+cu126 and 2.13.0a0+nv25.12 are builds of 2.13.0."""
        return _is_in_range(self.version, self.supported)


def _is_in_range(installed: str, supported: str) -> bool:
    release = re.match(r"\d+(\.\d+)*", installed)
    return release is not None and _import_packaging("specifiers").SpecifierSet(supported).contains(release[0])


def _import_packaging(name: str) -> Any:
    try:
        return import_module(f"packaging.{name}")
    except ImportError:  # in an environment that has only pip yet
        return import_module(f"pip._vendor.packaging.{name}")


def read_requirements() -> list[str]:
    """Return the dependencies in pyproject.toml, with all extras except those of `ON_REQUEST`."""
    table = _read_project_table(PROJECT)
    extras = [packages for name, packages in table.get("optional-dependencies", {}).items() if name not in ON_REQUEST]
    return [*table.get("dependencies", []), *chain(*extras)]


def read_extra(name: str) -> list[str]:
    """Return the packages of an extra in pyproject.toml."""
    return _read_project_table(PROJECT)["optional-dependencies"][name]


def _read_project_table(code: Path) -> dict[str, Any]:
    with (code / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]


def unmet_requirements(code: Path) -> list[tuple[str, str | None]]:
    """Return the dependencies in the pyproject.toml of `code` that are missing, or installed in another version.

    Extras are left out, as not every run needs them.

    Returns:
        Each requirement, such as "einops>=0.8", and the version that is installed, or None.
    """
    unmet: list[tuple[str, str | None]] = []
    for text in _read_project_table(code).get("dependencies", []):
        requirement = _import_packaging("requirements").Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            unmet.append((text, None))
        else:
            unmet += [] if _is_in_range(installed, str(requirement.specifier)) else [(text, installed)]
    return unmet


def is_requirement_of(requirement: str, package: str) -> bool:
    """Return whether a requirement such as "torch>=2.10,<2.14" is one of this package."""
    return re.match(rf"{package}(?![\w.-])", requirement) is not None


def installed_package(name: str) -> InstalledPackage | None:
    """Return the package of this name that this Python would import; None if there is none."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return None
    requirements = [text.partition(";")[0] for text in read_requirements() if is_requirement_of(text, name)]
    ranges = [re.sub(rf"^{name} *(\[.*\])?", "", text).strip() for text in requirements]
    return InstalledPackage(name, package.version, str(package.locate_file("")), ",".join(filter(None, ranges)))


def unsupported_packages(names: tuple[str, ...] = PACKAGES) -> list[InstalledPackage]:
    """Return those packages whose installed version is outside the range of pyproject.toml."""
    packages = [installed_package(name) for name in names]
    return [package for package in packages if package and not package.is_supported()]


def reject_unsupported_packages() -> None:
    """Raise `ConfigError` if this Python has torch or lightning in a version outside the range of pyproject.toml."""
    from hpc.config.errors import ConfigError  # only here: an installation begins without its libraries

    for package in unsupported_packages():
        raise ConfigError(package.name, package.version, package.rule, FIX)


if __name__ == "__main__":
    for unsupported in unsupported_packages(tuple(sys.argv[1:])):
        print(f"{unsupported.name} {unsupported.rule}; got {unsupported.version}. Try: {OTHER_VERSION}")
