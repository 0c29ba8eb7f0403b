"""Keep values from environment variables, which may be secrets, out of what a run saves."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from hpc.config.freezing import map_values_to_references


def hide_secrets(cfg: DictConfig, *owners: Any) -> None:
    """Replace values that came from the environment by their references, in hyperparameters that will be saved.

    Args:
        owners: the module and the data. What they keep by `save_hyperparameters` goes into checkpoints and to loggers.
    """
    references = map_values_to_references(cfg)
    for owner in owners:
        # The private one is the loggers' copy: Lightning has no public way to change it.
        for hparams in (getattr(owner, "hparams", {}), getattr(owner, "_hparams_initial", {})):
            for key, value in hparams.items():
                hparams[key] = _with_references(value, references)


def _with_references(value: Any, references: Mapping[str, str]) -> Any:
    """Return the value with references in place of values from the environment, at any depth."""
    if isinstance(value, dict):
        return {key: _with_references(item, references) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_references(item, references) for item in value)
    return references.get(value, value) if isinstance(value, str) else value
