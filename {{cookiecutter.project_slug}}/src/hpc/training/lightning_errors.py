"""Report what Lightning rejects before the first step as a `ConfigError`, like the project's own rules."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException

from hpc.config.build import raise_config_error_for_arguments
from hpc.config.errors import ConfigError


class AttemptState(Protocol):
    """The part of `attempt.Attempt` that is needed here."""

    has_started_training: bool
    undo_config_change: Callable[[], None] | None


@contextmanager
def convert_lightning_errors(run: AttemptState) -> Iterator[None]:
    """Convert Lightning's errors before the first step to `ConfigError`, and restore the run's config then."""
    try:
        try:
            yield
        except Exception as error:
            if not run.has_started_training:
                _convert(error)
            raise
    except ConfigError:
        if not run.has_started_training and run.undo_config_change:
            run.undo_config_change()
        raise


def _convert(error: Exception) -> None:
    """Raise `ConfigError` unless the researcher's or the template's own code has failed."""
    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    if "got an empty parameter list" in str(cause):  # torch.optim.Optimizer
        rule = "The optimizer must get a parameter to train: all are frozen, perhaps as the head shares its weight with "
        rule += "the frozen backbone"
        raise ConfigError("model", None, rule, "callbacks=default, or a head with a weight of its own") from error
    raise_config_error_for_arguments(error)
    is_lightning_value_error = isinstance(cause, ValueError) and _is_raised_by_lightning(cause)
    if isinstance(cause, MisconfigurationException) or is_lightning_value_error:
        rule = f"Lightning rejects this: {' '.join(str(cause).split())}"
        raise ConfigError("trainer, callbacks or model", None, rule, "change what the message names") from error


def _is_raised_by_lightning(error: BaseException) -> bool:
    """Return whether the innermost frame of the traceback lies in Lightning."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith("lightning.pytorch.")
