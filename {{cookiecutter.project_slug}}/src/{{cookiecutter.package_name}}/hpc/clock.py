"""Lightning's timing points, of which a run wants one: how long it waits for data. The others cost next to nothing."""

from contextlib import nullcontext
from time import perf_counter
from typing import Any

from lightning.pytorch.profilers import Profiler

WAITS = "train_dataloader_next"  # how the name of that point ends
NOTHING = nullcontext()


class Clock(Profiler):
    """`waited`: seconds that training has waited for data so far."""

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
