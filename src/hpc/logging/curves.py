"""The curves of training, written without waiting: numbers are read from the device long after it computed them."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hpc.launch.object_gather import all_gather_objects
from hpc.privates import lightning as privates
from hpc.strategies.gradients import last_gradient_norm

PREFIX = "step/"  # of the names of these curves
LOSS = f"{PREFIX}loss"


@dataclass
class CurvePoint:
    """The numbers of one step, on their way to the host."""

    step: int
    numbers: dict[str, Tensor]  # of this rank, by name
    agreed: list[str]  # names that all ranks send, in this order
    one: Tensor  # this rank's share of the samples, a scalar: 1 if all ranks have equally many
    sums: Tensor  # over the ranks: of the values, of the shares of ranks that have each, of how many have other names
    host_values: dict[str, float]  # numbers that the host knew already
    wait: Callable[[], object] | None  # until `sums` are on the host; None: they are
    new_names: list[str] = field(default_factory=list)  # that some ranks have beyond `agreed`, once all were waited for

    def wait_for_means(self) -> dict[str, float]:
        """Wait for the sums, and return means over those ranks that have a name. All ranks call this.

        Names on which ranks have not agreed cost a message more.
        """
        means, has_other_names = self._read()
        if has_other_names:
            rest = {name: value for name, value in self.numbers.items() if name not in self.agreed}
            self.new_names = sorted({name for names in all_gather_objects(list(rest)) for name in names})
            means |= start_reduction(self.step, rest, agreed=self.new_names, one=self.one)._read()[0]
        return self.host_values | means if means else {}

    def _read(self) -> tuple[dict[str, float], bool]:
        """Return the means of the agreed names, and whether a rank has others."""
        if self.wait is not None:
            self.wait()
        *sums, num_with_others = self.sums.tolist()
        values, counts = sums[: len(self.agreed)], sums[len(self.agreed) :]
        means = {name: value / num for name, value, num in zip(self.agreed, values, counts, strict=True) if num}
        return means, num_with_others > 0


class Curves(L.Callback):
    """Loss, learning rate, norm of the gradients, and what else `training_step` returns: means over all ranks.

    A point is made every `trainer.log_every_n_steps` steps, and at some of the first ones (`has_point`). It is written
    when the next one is made, or before a validation, a checkpoint and the end: no step waits for a kernel or for
    another rank, and only these steps exchange numbers. Names begin with "step/", as those of no `self.log` do: where a
    module logs its loss, too, both curves are there.
    """

    def __init__(self) -> None:
        self._points: deque[CurvePoint] = deque()
        self._micro_batches: list[dict[str, Tensor]] = []  # scalars of each micro-batch of the step
        self._agreed: list[str] = []  # names of which all ranks know
        self._shares: list[float] = []  # of this rank, in the samples of each micro-batch
        self._lr = 0.0

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = privates.logged_step(trainer)
        if not has_point(step + 1, trainer.log_every_n_steps):
            return
        scalars, share = select_scalars(outputs, trainer.strategy.root_device), getattr(trainer.strategy, "share", 1.0)
        self._micro_batches.append({name: value * share for name, value in scalars.items()})
        self._shares.append(share)
        if privates.is_accumulating(trainer):  # asked, not counted: an epoch's last step may have fewer micro-batches
            return
        self.write(trainer)
        means = mean_over_micro_batches(self._micro_batches, accumulate=trainer.accumulate_grad_batches)
        share, self._micro_batches, self._shares = sum(self._shares) / len(self._shares), [], []
        if means and (norm := last_gradient_norm(pl_module)) is not None:  # else training_step has returned nothing
            means[f"{PREFIX}grad_norm"] = norm
        device = trainer.strategy.root_device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # of all ranks, whatever they return
        one = torch.full((), share, device=device, dtype=dtype)
        self._points.append(
            start_reduction(step, means, agreed=self._agreed, one=one, host_values={f"{PREFIX}lr": self._lr})
        )

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.write(trainer)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.write(trainer)

    def state_dict(self) -> dict[str, Any]:
        # With manual optimization the next batch may make no optimizer step. Its point then shows this rate.
        return {"lr": self._lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._lr = state_dict["lr"]

    def write(self, trainer: L.Trainer) -> None:
        """Give the collected points to the loggers and to the progress bar."""
        while self._points:
            point = self._points.popleft()
            numbers = point.wait_for_means()
            self._agreed = self._agreed + point.new_names
            if not numbers:
                continue
            if LOSS in numbers:
                show_in_progress_bar(trainer, {LOSS: numbers[LOSS]})
            for logger in trainer.loggers:
                logger.log_metrics(numbers, point.step)


def has_point(number: int, interval: int) -> bool:
    """Return whether a step, counted from 1, has a point: each `interval`-th, and before these 1, 2, 5, 10, 20, 50, ...

    The latter show how a run begins, however short it is.
    """
    return number % interval == 0 or (number < interval and str(number).rstrip("0") in ("1", "2", "5"))


def show_in_progress_bar(trainer: Any, numbers: Mapping[str, float]) -> None:
    """Give numbers to the progress bar; one rank alone may call this."""
    privates.progress_bar_metrics(trainer).update(numbers)


def select_scalars(outputs: Mapping[Any, Any] | None, device: torch.device) -> dict[str, Tensor]:
    """Return the outputs of `training_step` that make a curve: loss, scalar tensors and numbers, on the device."""
    selected = {}
    for name, value in (outputs or {}).items():
        if isinstance(value, Tensor):
            # Predictions for a batch of one are no scalar. A loss of one number may have any shape.
            if value.is_complex() or (value.numel() != 1 if name == "loss" else value.ndim):
                continue
            value = value.detach().float().reshape(())
        elif not isinstance(value, Real):
            continue
        if isinstance(name, str):
            is_on_device = isinstance(value, Tensor) and value.device == device
            selected[name] = value if is_on_device else torch.full((), float(value), device=device)  # without a wait
    return selected


def mean_over_micro_batches(outputs: Sequence[Mapping[str, Tensor]], *, accumulate: int) -> dict[str, Tensor]:
    """Return the mean of each output over a step's micro-batches; under the name of its curve.

    Args:
        accumulate: `trainer.accumulate_grad_batches`, by which Lightning has divided the losses already.
    """
    values: dict[str, list[Tensor]] = defaultdict(list)
    for output in outputs:
        for name, value in output.items():
            values[name].append(value)
    means = {}
    for name, tensors in values.items():
        divisor = len(tensors) / accumulate if name == "loss" else len(tensors)
        means[PREFIX + name] = torch.stack(tensors).sum() / divisor
    return means


def start_reduction(
    step: int,
    numbers: dict[str, Tensor],
    *,
    agreed: list[str],
    one: Tensor,
    host_values: dict[str, float] | None = None,
) -> CurvePoint:
    """Start to sum scalars over the ranks by their names and to copy the sums to the host, without waiting.

    Args:
        numbers: values times this rank's share of the samples.
        agreed: names that all ranks send, whether they have them or not; the same on all ranks.
        one: the share, a scalar on the device.
    """
    zero, wait = torch.zeros_like(one), None
    values = [numbers.get(name, zero) for name in agreed]
    counts = [one if name in numbers else zero for name in agreed]
    sums = torch.stack([*values, *counts, torch.ones_like(one) if numbers.keys() - set(agreed) else zero])
    if dist.is_initialized() and dist.get_world_size() > 1:
        work: Any = dist.all_reduce(sums, async_op=True)
        wait = work.wait
    if sums.device.type == "cuda":
        if wait is not None:
            wait()  # makes the device wait, not the host
        sums = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        wait = copied.synchronize
    return CurvePoint(step, numbers, agreed, one, sums, host_values or {}, wait)
