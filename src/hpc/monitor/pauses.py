"""The time in which training waits for a validation or a save, with the start of the validation's workers."""

import time
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from hpc.resume.resume import Resume


class PauseClock:
    """Measure the pauses of training on this rank. Lightning has no hook that it calls as early and as late.

    Attributes:
        seconds: total so far.
        begin_time: unix time at which the present pause, or the last one, began.
    """

    def __init__(self, trainer: Any) -> None:
        self.seconds = self.begin_time = 0.0
        self._is_paused = False  # a validation may save, too
        savers = [callback.saver for callback in trainer.callbacks if isinstance(callback, Resume)]
        calls = [(trainer.fit_loop.epoch_loop.val_loop, "run"), (trainer, "save_checkpoint")]
        for owner, name in [*calls, *((saver, "start_save") for saver in savers)]:
            setattr(owner, name, partial(self._measure, getattr(owner, name)))

    def _measure(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._is_paused:
            return call(*args, **options)
        self._is_paused, self.begin_time, begin = True, time.time(), perf_counter()
        try:
            return call(*args, **options)
        finally:
            self.seconds += perf_counter() - begin
            self._is_paused = False
