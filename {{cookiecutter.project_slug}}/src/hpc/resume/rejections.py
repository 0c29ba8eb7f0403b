"""What Lightning rejects before the first step, said as the project's own rules say it; the result of a pruned run."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import lightning as L
from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from hpc.config.build import reject_arguments
from hpc.config.errors import ConfigError
from hpc.resume.resume import Resume
from hpc.run.watchdog import Stopped
from hpc.training import record


@contextmanager
def given_up(trainer: L.Trainer, cfg: DictConfig, resume: Resume) -> Iterator[None]:
    """Around fitting: a run that its search ends early has a result all the same, that of its last validation."""
    try:
        yield
    except Stopped as stopped:
        if stopped.outcome == "finished":
            record.result(trainer, cfg, resume.metrics)
        raise


@contextmanager
def rejections(resume: Resume, take_back: Callable[[], None] | None = None) -> Iterator[None]:
    """What Lightning rejects before the first step is rejected as the project's own rules do: in a sentence.

    Args:
        take_back: what to do when this start is rejected; see `begin`.
    """
    try:
        try:
            yield
        except Exception as error:
            if not resume.trains:
                _reject(error)
            raise
    except ConfigError:
        if not resume.trains and take_back:
            take_back()
        raise


def _reject(error: Exception) -> None:
    """Raises `ConfigError` where this is no failure of the project's own code."""
    reject_arguments(error)
    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    if isinstance(cause, MisconfigurationException) or (isinstance(cause, ValueError) and _is_lightnings(cause)):
        rule = f"Lightning rejects this: {' '.join(str(cause).split())}"
        raise ConfigError("trainer, callbacks or model", None, rule, "change what it names") from error


def _is_lightnings(error: BaseException) -> bool:
    """Did Lightning itself raise it?"""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").startswith("lightning.pytorch.")
