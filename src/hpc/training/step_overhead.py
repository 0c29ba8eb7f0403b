"""Lower the cost of what Lightning does at every step."""

from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.profilers import Profiler

DATA_WAIT_SUFFIX = "train_dataloader_next"  # of the name that Lightning gives to the time it waits for a batch
NO_TIMING = nullcontext()
# The hooks that Lightning calls of every callback at every step. A hook that is not callable is skipped.
STEP_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad")
STEP_HOOKS += ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
EMPTY_HOOKS = {name: getattr(L.Callback, name) for name in STEP_HOOKS}


class DataWaitClock(Profiler):
    """Measure how long training waits for data; skip Lightning's other timings, at next to no cost.

    Attributes:
        waited_seconds: total so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited_seconds = 0.0
        self._start_time = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith(DATA_WAIT_SUFFIX):
            self._start_time = perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(DATA_WAIT_SUFFIX):
            self.waited_seconds += perf_counter() - self._start_time

    def profile(self, action_name: str) -> Any:
        return NO_TIMING


def disable_noop_hooks(callbacks: Sequence[L.Callback]) -> None:
    """Disable those hooks of a step that a callback does not override."""
    for callback in callbacks:
        for name, empty in EMPTY_HOOKS.items():
            is_instance_hook = name in vars(callback)  # LambdaCallback sets its hooks on the instance
            if getattr(type(callback), name) is empty and not is_instance_hook:
                disable_hook(callback, name)


def disable_hook(callback: L.Callback, name: str) -> None:
    """Keep Lightning from calling this hook of the callback from now on."""
    setattr(callback, name, None)
