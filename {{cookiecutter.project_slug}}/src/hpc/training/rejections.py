"""What Lightning rejects before the first step, reported as the project's own rules report it."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException

from hpc.config.build import reject_bad_arguments
from hpc.config.errors import ConfigError


class Start(Protocol):
    """A start of a run, as `Attempt`."""

    trains: bool
    take_back: Callable[[], None] | None


@contextmanager
def rejections(run: Start) -> Iterator[None]:
    """Reject in a sentence what Lightning rejects before the first step, and take back what the start has changed."""
    try:
        try:
            yield
        except Exception as error:
            if not run.trains:
                _reject(error)
            raise
    except ConfigError:
        if not run.trains and run.take_back:
            run.take_back()
        raise


def _reject(error: Exception) -> None:
    """Raise `ConfigError` where this is no failure of the project's own code."""
    reject_bad_arguments(error)
    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    if isinstance(cause, MisconfigurationException) or (isinstance(cause, ValueError) and _is_lightnings(cause)):
        rule = f"Lightning rejects this: {' '.join(str(cause).split())}"
        raise ConfigError("trainer, callbacks or model", None, rule, "change what it names") from error


def _is_lightnings(error: BaseException) -> bool:
    """Did Lightning itself raise it?"""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith("lightning.pytorch.")
