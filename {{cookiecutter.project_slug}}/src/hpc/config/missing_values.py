"""Check that every key of a config has a value, and that every reference leads to one."""

import re

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError
from hpc.config.personal_clusters import PERSONAL_CLUSTERS


def check_complete(cfg: DictConfig, *, needs_data: bool = True) -> None:
    """Check that no `???` is left and that no reference is broken.

    Args:
        needs_data: whether the section data must be complete, too.

    Raises:
        ConfigError: naming all keys without a value, or the first broken reference.
    """
    if missing := [key for key in unset_keys(cfg) if needs_data or not key.startswith("data.")]:
        is_one = len(missing) == 1
        rule = "must have a value, as it has no default" if is_one else "must have values, as they have no default"
        raise ConfigError(", ".join(missing), None, rule, " ".join(f"{key}=<value>" for key in missing))
    for key, value in flatten(cfg).items():
        _check_reference(cfg, key, value)


def check_complete_for_job(cfg: DictConfig) -> None:
    """Check the same, and that the cluster has what a job on it cannot do without (`cluster.required`).

    Raises:
        ConfigError: naming all keys without a value, or the first broken reference.
    """
    required = [f"cluster.{name}" for name in _required_names(cfg) if _is_empty(cfg, f"cluster.{name}")]
    if required:
        missing = [*required, *(key for key in unset_keys(cfg) if key not in required)]
        noun, name = "a value" if len(missing) == 1 else "values", OmegaConf.select(cfg, "cluster.name")
        overrides = " ".join(f"{key}=<{key.rpartition('.')[2]}>" for key in missing)
        fix = f"{overrides}; {PERSONAL_CLUSTERS} can keep those of the cluster"
        raise ConfigError(", ".join(missing), None, f"must have {noun} for a job on cluster={name}", fix)
    check_complete(cfg)


def unset_keys(cfg: DictConfig) -> list[str]:
    """Return the keys whose value is still `???`."""
    return [key for key, value in flatten(cfg).items() if value == "???"]


def _required_names(cfg: DictConfig) -> list[str]:
    """Return the names in `cluster.required`; none if it is not a list, which `to_dataclass` rejects."""
    required = OmegaConf.select(cfg, "cluster.required")
    return [str(name) for name in required] if isinstance(required, ListConfig) else []


def _is_empty(cfg: DictConfig, key: str) -> bool:
    try:
        return OmegaConf.select(cfg, key) in (None, "")
    except OmegaConfBaseException:
        return False  # a broken reference, which check_complete reports


def _check_reference(cfg: DictConfig, key: str, value: object) -> None:
    """Raise `ConfigError` if the value of a key refers to a key or an environment variable that does not exist.

    Other resolution errors pass: the rules on the values involved report them.
    """
    try:
        OmegaConf.select(cfg, key, throw_on_missing=True)
    except (MissingMandatoryValue, InterpolationToMissingValueError):
        return
    except InterpolationKeyError:
        rule = "must refer to a key of this config (these choices of groups do not go together)"
        other = str(value).strip("${}").split(".")[0]
        raise ConfigError(key, value, rule, f"another choice of {key.split('.')[0]}= or of {other}=") from None
    except InterpolationResolutionError as error:
        if unset := re.search(r"Environment variable '(.*?)' not found", str(error)):
            rule = f"The environment variable {unset[1]} must be set"
            raise ConfigError(key, value, rule, f"export {unset[1]}=..., here and where jobs are submitted") from None
    except OmegaConfBaseException:
        return
