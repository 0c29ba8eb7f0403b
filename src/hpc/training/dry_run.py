"""A training step outside of training: a module gets a Trainer that answers what it asks, and changes nothing.

It is for counting what a step costs, on tensors without content (fake_tensors.py).
"""

import linecache
import logging
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from hpc.config.errors import first_line
from hpc.config.project import LIBRARY, PROJECT
from hpc.privates.torch import DataDependentOutputException, DynamicOutputShapeException

NUM_STEPS = 1000  # that schedules are told
HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start")
# Where code is that is not the researcher's.
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {str(LIBRARY)})


class DryRunTrainer(L.Trainer):
    """A Trainer of one process that runs no loop and logs nothing.

    Attributes:
        told_ranks: how many ranks it tells whoever asks for its `world_size`.
        was_asked_for_ranks: whether somebody has asked.
    """

    told_ranks = 1
    was_asked_for_ranks = False

    def __init__(self) -> None:
        with _quiet():
            super().__init__(
                accelerator="cpu", devices=1, plugins=[LightningEnvironment()], barebones=True, max_steps=NUM_STEPS
            )
        self.loggers = [DummyLogger()]
        self.state.fn = TrainerFn.FITTING
        self.training = True
        self.datamodule: L.LightningDataModule | None = None

    @property
    def world_size(self) -> int:
        self.was_asked_for_ranks = True
        return self.told_ranks

    @property
    def estimated_stepping_batches(self) -> int:
        return self.max_steps

    @property
    def num_training_batches(self) -> int:
        return self.max_steps


def attach(module: L.LightningModule, trainer: DryRunTrainer) -> None:
    """Attach the Trainer to a module, and complete the module as Lightning does before training."""
    module.trainer = trainer
    trainer.strategy.connect(module)
    module.setup("fit")
    module.configure_model()
    module.train(True)  # said, as a module of the researcher's may have a `train(mode)` without a default


def make_optimizers(module: L.LightningModule) -> None:
    """Make the optimizers and schedules of an attached module, in any form that Lightning allows."""
    with _quiet():
        module.trainer.strategy.setup_optimizers(module.trainer)


def begin_training(module: L.LightningModule) -> None:
    """Call the module's hooks at the start of training."""
    for name in HOOKS:
        getattr(module, name)()


def transfer(module: L.LightningModule, batch: Any) -> Any:
    """Return a batch as the module's hooks make it, around the transfer to a device."""
    for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
        batch = getattr(module, name)(batch, 0)
    return batch


def training_step(module: L.LightningModule, batch: Any) -> Tensor | None:
    """Call the module's `training_step`, and return the loss; None with manual optimization.

    Nothing is logged, and metrics do nothing: they cost next to nothing, but look at values.

    Raises:
        TypeError: with automatic optimization, it returns no loss.
    """
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    with _without_logs(module):
        output = module.training_step(batch, 0) if takes_index else module.training_step(batch)
    if not module.automatic_optimization:
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        given = type(loss).__name__
        raise TypeError(f"training_step must return a loss, or a dict with `loss`; it has returned {given}")
    return loss


@contextmanager
def _without_logs(module: L.LightningModule) -> Iterator[None]:
    """Let a step neither log nor update metrics, nor grow the lists that a module keeps."""
    lists = {name: len(value) for name, value in vars(module).items() if isinstance(value, list)}
    metrics = [part for part in module.modules() if isinstance(part, Metric | MetricCollection)]
    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "log", _do_nothing))  # log_dict calls it
        for metric in metrics:
            stack.enter_context(patch.object(metric, "update", _do_nothing))
            stack.enter_context(patch.object(metric, "forward", partial(_zeros, metric, module.device)))
        yield
    for name, length in lists.items():
        del vars(module)[name][length:]


def _zeros(metric: Metric | MetricCollection, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """Return values in the form in which a metric returns them."""
    zero = torch.zeros((), device=device)
    return dict.fromkeys(metric.keys(), zero) if isinstance(metric, MetricCollection) else zero


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for what a dry run must not do."""


@contextmanager
def without_process_group() -> Iterator[None]:
    """Hide the default process group within the block, as other ranks do not take part in a dry run."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        yield
        return
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = group


def explain(error: BaseException, operation: str | None = None) -> str:
    """Return where in the researcher's code an error was raised, and why, in one line.

    Args:
        operation: of torch, during which it was raised.
    """
    while error.__cause__:  # Hydra wraps the error of a class
        error = error.__cause__
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        why = f"it needs the value of a tensor, as .item() and a branch do ({error.func})"
    else:
        during = f" ({operation})" if operation else ""
        why = f"{type(error).__name__}: {first_line(error)}{during}"
    return " ".join(filter(None, [_place(error), why]))


def _place(error: BaseException) -> str:
    """Return the innermost line of the researcher's code as "file:line, `code`:"; empty if there is none."""
    frames = [(Path(frame.f_code.co_filename), number) for frame, number in walk_tb(error.__traceback__)]
    own = [(file, number) for file, number in frames if not _is_library(file)]
    if not own:
        return ""
    file, number = own[-1]
    shown = file.relative_to(PROJECT) if file.is_relative_to(PROJECT) else file.name
    return f"{shown}:{number}, `{linecache.getline(str(file), number).strip()}`:"


def _is_library(file: Path) -> bool:
    """Return whether a file is not the researcher's. Packages of a module or an image lie outside the environment."""
    return str(file).startswith(("<", *LIBRARIES)) or not {"site-packages", "dist-packages"}.isdisjoint(file.parts)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what Lightning says about a Trainer, which is not the run's."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)  # which also forgets what its children have worked out before
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
