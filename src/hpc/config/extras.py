"""Extras of the library that env.sh leaves out: packages that only some runs need, installed on request."""

import shlex
from collections.abc import Sequence
from importlib.util import find_spec

from hpc.config import versions
from hpc.config.errors import ConfigError

# The modules of each, as they are imported.
MODULES = {
    "huggingface": ["datasets", "peft", "transformers"],
    "mlflow": ["mlflow", "sqlalchemy", "alembic"],
    "wandb": ["wandb"],
}


def require(extra: str, key: str, value: object, *, modules: Sequence[str] | None = None) -> None:
    """Raise `ConfigError` unless the packages of an extra are installed.

    Args:
        key: of the config that needs them, and its value.
        modules: those that are needed; None: all of the extra.
    """
    if error := missing(extra, key, value, modules=modules):
        raise error


def missing(extra: str, key: str, value: object, *, modules: Sequence[str] | None = None) -> ConfigError | None:
    """Return the error that `require` raises, or None."""
    if names := [name for name in modules or MODULES[extra] if not _is_installed(name)]:
        rule = f"This needs packages that are not installed: {', '.join(names)}"
        fix = f"python -m pip install -c constraints.txt {shlex.join(versions.read_extra(extra))}"
        return ConfigError(key, value, rule, fix)
    return None


def _is_installed(module: str) -> bool:
    """Return whether a library can be imported. A folder of its name does not count, such as wandb's for its files."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
