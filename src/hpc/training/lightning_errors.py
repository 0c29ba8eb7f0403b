"""Report what Lightning rejects before the first step as a `ConfigError`, like the project's own rules."""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from hydra.errors import InstantiationException
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from hpc.config.build import raise_config_error_for_arguments
from hpc.config.errors import ConfigError, first_line
from hpc.privates.torch import tree_leaves


class AttemptState(Protocol):
    """The part of `attempt.Attempt` that is needed here."""

    has_started_training: bool


@contextmanager
def convert_lightning_errors(run: AttemptState) -> Iterator[None]:
    """Convert Lightning's errors before the first step to `ConfigError`."""
    try:
        yield
    except Exception as error:
        if not run.has_started_training:
            _convert(error)
        raise


def _convert(error: Exception) -> None:
    """Raise `ConfigError` unless the researcher's or the template's own code has failed."""
    cause = error.__cause__ if isinstance(error, InstantiationException) else error
    if "got an empty parameter list" in str(cause):  # torch.optim.Optimizer
        rule = "The optimizer needs a parameter to train, but all are frozen; "
        rule += "the head may share its weight with the frozen backbone"
        raise ConfigError("model", None, rule, "callbacks=default, or a head with a weight of its own") from error
    if "got num_samples=0" in str(cause):  # torch.utils.data.RandomSampler
        rule = "A dataset that is shuffled must have a sample; this one is empty"
        fix = "data with samples: perhaps a path, a pattern or a split is wrong"
        raise ConfigError("data", None, rule, fix) from error
    raise_config_error_for_arguments(error)
    _reject_unfit_batch(cause)
    is_lightning_value_error = isinstance(cause, ValueError) and _is_raised_by_lightning(cause)
    if isinstance(cause, MisconfigurationException) or is_lightning_value_error:
        rule = f"Lightning rejects this: {' '.join(str(cause).split())}"
        raise ConfigError("trainer, callbacks or model", None, rule, "change what the message names") from error


def _reject_unfit_batch(error: BaseException | None) -> None:
    """Raise `ConfigError` if a layer or a loss of torch cannot compute the first batch: it has another shape or type.

    Other errors in a step are the researcher's, who needs the traceback.
    """
    if error is None:
        return
    calls = list(traceback.walk_tb(error.__traceback__))[::-1]
    is_layer = bool(calls) and _module_of(calls[0][0]).startswith("torch.nn.")
    batch = next((frame.f_locals["batch"] for frame, _ in calls if "batch" in frame.f_locals), None)
    if type(error) not in (RuntimeError, IndexError, ValueError) or not is_layer or batch is None:
        return
    caller, line = next((frame, line) for frame, line in calls if not _module_of(frame).startswith("torch."))
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
    rule = f"The first batch ({shapes}) does not fit the network: {first_line(error)} "
    rule += f"({caller.f_code.co_filename}, line {line})"
    is_local = isinstance(error, IndexError)  # a target or token out of bounds is perhaps in one rank's samples alone
    fix = "another model= or data=; --cfg job shows their sizes"
    if re.search("same dtype|scalar type", str(error)):
        fix = "tensors of one precision in the batch and in the step, or another trainer.precision="
    raise ConfigError("model and data", None, rule, fix, only_this_rank=is_local) from error


def _is_raised_by_lightning(error: BaseException) -> bool:
    """Return whether the innermost frame of the traceback lies in Lightning."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and _module_of(frames[-1][0]).startswith("lightning.pytorch.")


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
