"""The curves of training, written without waiting: what the device computes is read when it has long been there."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hpc.training.parallel import gradient_norm


@dataclass
class Point:
    """The numbers of one step, on their way to the host."""

    step: int
    names: list[str]
    values: Tensor  # sums over the ranks
    plain: dict[str, float]  # what the host knew already
    wait: Callable[[], object] | None  # till they are there; None: they are
    left_out: set[str] | None = None  # names that are the module's own; None: not asked yet

    def read(self) -> dict[str, float]:
        if self.wait is not None:
            self.wait()
        means = self.values / (dist.get_world_size() if dist.is_initialized() else 1)
        numbers = self.plain | dict(zip(self.names, means.tolist(), strict=True))
        return {name: number for name, number in numbers.items() if name not in (self.left_out or ())}


class Curves(L.Callback):
    """Loss, learning rate, norm of the gradients, and what `training_step` returns besides: means over all ranks.

    Every `trainer.log_every_n_steps` steps. Each point is written when the next one is made, or before a validation, a
    checkpoint and the end: no step waits for a kernel or for another rank, and only these steps exchange numbers.
    A name that the module logs itself is left to it.
    """

    def __init__(self) -> None:
        self._points: deque[Point] = deque()
        self._micro: list[dict[str, Tensor]] = []  # of the step's micro-batches
        self._lr = 0.0
        self._logged: set[str] = set()  # by the module, in an earlier process
        self._told: set[str] = set()  # names that were printed as left out

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning numbers what it logs
        if (step + 1) % trainer.log_every_n_steps:
            return
        self._micro.append(scalars(outputs, trainer.strategy.root_device))
        if trainer.fit_loop._should_accumulate():  # the last step of an epoch may be made of fewer
            return
        self.write(trainer)
        means = mean(self._micro, trainer.accumulate_grad_batches)
        self._micro = []
        if not means:  # training_step has returned nothing
            return
        if (norm := gradient_norm(pl_module)) is not None:
            means["grad_norm"] = norm
        self._points.append(sent(step, means, {"lr": self._lr}))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._leave_out(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.write(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._leave_out(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.write(trainer)
        checkpoint["logged"] = sorted(self._logged | logged(trainer))

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._logged = set(checkpoint.get("logged", ()))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.write(trainer)

    def state_dict(self) -> dict[str, Any]:
        # With manual optimization the next batch may make no step, and has this one's rate.
        return {"lr": self._lr, "told": sorted(self._told)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._lr, self._told = state_dict["lr"], set(state_dict.get("told", ()))

    def write(self, trainer: L.Trainer) -> None:
        """Give what was collected to the loggers and to the progress bar."""
        self._leave_out(trainer)
        while self._points:
            point = self._points.popleft()
            if not (numbers := point.read()):
                continue
            if "train/loss" in numbers:
                show(trainer, {"train/loss": numbers["train/loss"]})
            for logger in trainer.loggers:
                logger.log_metrics(numbers, point.step)

    def _leave_out(self, trainer: Any) -> None:
        """Leave out of the last point what the module logs itself.

        Called right after its step: later, this would depend on when the point is written, which a checkpoint decides.
        """
        if not self._points or self._points[-1].left_out is not None:
            return
        point = self._points[-1]
        point.left_out = {*point.names, *point.plain} & (self._logged | logged(trainer))
        if (new := point.left_out - self._told) and trainer.is_global_zero:
            names = ", ".join(sorted(new))
            curves = f"these curves have its values alone from step {point.step} on"
            print(f"note: the module logs {names} itself: {curves}", flush=True)
        self._told |= new


def show(trainer: Any, numbers: Mapping[str, float]) -> None:
    """Give numbers to the progress bar.

    Not through `trainer.progress_bar_metrics`: at the end of an epoch that has all ranks compute what was logged, and
    this may be called by one of them alone.
    """
    trainer._logger_connector._progress_bar_metrics.update(numbers)


def logged(trainer: Any) -> set[str]:
    """Names that loggers get of what `self.log` was given so far, in training and in validation."""
    loop = trainer.fit_loop.epoch_loop
    # Private, but what is logged once an epoch is known nowhere else before its end.
    return {
        results._forked_name(result, on_step)[1]
        for results in (loop._results, loop.val_loop._results)
        for result in results.values()
        for on_step in (True, False)
        if result.meta.logger
    }


def scalars(outputs: Mapping[Any, Any] | None, device: torch.device) -> dict[str, Tensor]:
    """What makes a curve, of all that `training_step` has returned: its loss, scalar tensors and numbers."""
    found = {}
    for name, value in (outputs or {}).items():
        if isinstance(value, Tensor):
            # Predictions for a batch of one are no scalar. A loss of one number may have any shape.
            if value.is_complex() or (value.numel() != 1 if name == "loss" else value.ndim):
                continue
            value = value.detach().float().reshape(())
        elif not isinstance(value, Real):
            continue
        if isinstance(name, str):
            on_device = isinstance(value, Tensor) and value.device == device
            found[name] = value if on_device else torch.full((), float(value), device=device)  # without a wait
    return found


def mean(outputs: Sequence[Mapping[str, Tensor]], accumulate: int) -> dict[str, Tensor]:
    """Of what the micro-batches of a step returned. Lightning has divided the losses by `accumulate` already."""
    values: dict[str, list[Tensor]] = defaultdict(list)
    for output in outputs:
        for name, value in output.items():
            values[name].append(value)
    means = {}
    for name, those in values.items():
        share = len(those) / accumulate if name == "loss" else len(those)
        means["train/loss" if name == "loss" else name] = torch.stack(those).sum() / share
    return means


def sent(step: int, numbers: dict[str, Tensor], plain: dict[str, float]) -> Point:
    """Begin to add up scalars over the ranks and to bring them to the host."""
    values, wait = torch.stack(list(numbers.values())), None
    if dist.is_initialized() and dist.get_world_size() > 1:
        work: Any = dist.all_reduce(values, async_op=True)
        wait = work.wait
    if values.device.type == "cuda":
        if wait is not None:
            wait()  # lets the device wait, not the host
        values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        wait = copied.synchronize
    return Point(step, list(numbers), values, plain, wait)
