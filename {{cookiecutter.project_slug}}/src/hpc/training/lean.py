"""What Lightning does at every step, at less cost."""

from collections.abc import Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import lightning as L
from lightning.pytorch.profilers import Profiler

WAITS = "train_dataloader_next"  # how the name of the timing point around a batch's loading ends
NOTHING = nullcontext()
# What Lightning calls of every callback at every step; where it is no function, it goes on to the next callback.
EACH_STEP = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad")
EACH_STEP += ("on_before_backward", "on_after_backward", "on_before_optimizer_step")
EMPTY = {name: getattr(L.Callback, name) for name in EACH_STEP}


class Clock(Profiler):
    """Of Lightning's timing points the one that a run wants to know. The others cost next to nothing.

    `waited`: seconds that training has waited for data so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waited = 0.0
        self._since = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith(WAITS):
            self._since = perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(WAITS):
            self.waited += perf_counter() - self._since

    def profile(self, action_name: str) -> Any:
        return NOTHING


def called(callbacks: Sequence[L.Callback]) -> list[L.Callback]:
    """The same callbacks, without those functions that do nothing at each step."""
    for callback in callbacks:
        for name, empty in EMPTY.items():
            if getattr(type(callback), name) is empty and name not in vars(callback):  # LambdaCallback has its own
                drop(callback, name)
    return list(callbacks)


def drop(callback: L.Callback, name: str) -> None:
    """From now on this function of the callback is not called any more."""
    setattr(callback, name, None)
