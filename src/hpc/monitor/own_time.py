"""The time of a step that a rank spends by itself, by which a slow rank is found.

A step takes equally long on all ranks, as they wait for each other. Until a rank's backward begins it waits for none,
unless its forward gathers shards of parameters or statistics (SyncBatchNorm): then only the wait for data is its own.
"""

from time import perf_counter
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from hpc.training.step_overhead import DataWaitClock


class OwnTime:
    """Add up the wait for data and, of strategies whose forward is the rank's own, the time until backward begins."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        strategy = trainer.strategy
        waits = any(isinstance(part, torch.nn.SyncBatchNorm) for part in trainer.lightning_module.modules())
        is_replicated = isinstance(strategy, DDPStrategy) and not getattr(strategy, "zero_stage_3", False)
        self.has_own_forward = is_replicated and not waits
        self._spans: list[tuple[Any, Any]] = []  # moments at which the device began a batch, and its backward
        self._num_batches = self._num_steps = 0
        self._waited_before = data_wait_seconds(trainer) or 0.0
        self._is_forward = False

    def begin_batch(self) -> None:
        self._is_forward = True
        self._num_batches += 1

    def begin_backward(self, batch_begin: Any) -> None:
        """Note the first backward of a batch, which began at this moment."""
        if self._is_forward and self.has_own_forward:
            self._spans.append((batch_begin, record_moment(self._trainer.strategy.root_device)))
        self._is_forward = False

    def end_step(self) -> None:
        self._num_steps += 1

    def take_microseconds(self) -> int:
        """Return the mean of a step since the last call; 0 if there was none. Waits for no device.

        It is called when ranks meet, so a batch that has begun is not measured: its time includes the wait for others.
        """
        waited = data_wait_seconds(self._trainer) or 0.0
        own, self._waited_before = waited - self._waited_before, waited
        reached = [span for span in self._spans if is_reached(span[1])]
        if reached:
            own += sum(elapsed_seconds(*span) for span in reached) / len(reached) * self._num_batches
        mean = round(1e6 * own / self._num_steps) if self._num_steps else 0
        self._spans, self._num_batches, self._num_steps, self._is_forward = [], 0, 0, False
        return mean


def data_wait_seconds(trainer: Any) -> float | None:
    """Return how long training has waited for data; None if `trainer.profiler` is not a `DataWaitClock`."""
    return trainer.profiler.waited_seconds if isinstance(trainer.profiler, DataWaitClock) else None


def record_moment(device: torch.device) -> Any:
    """Return a moment of the device: an event that a GPU will reach, or else the host's clock."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_reached(moment: Any) -> bool:
    """Return whether the device has reached a moment."""
    return isinstance(moment, float) or moment.query()


def elapsed_seconds(start: Any, end: Any) -> float:
    """Return the seconds between two moments; wait until a GPU has reached them."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
