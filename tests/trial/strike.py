"""A strike on one rank of a program: at a place, when it is passed for the n-th time, something happens.

This file is also put into a baked project, as src/my_research/strike.py, where callbacks of jobs use it.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITER = "save"  # a place: any sync or rename of a file by a thread that writes a checkpoint
OUTSIDE = "outside"  # a place: the signal is sent to all ranks by the process that has forked them, after `seconds`
CLOCK = "clock"  # a deed: the job's wall time is over
ENDS = ("SIGKILL", "SIGINT", "raise", "exit")  # deeds after which a rank need not save


@dataclass(frozen=True)
class Strike:
    """What happens to which rank, and where.

    Attributes:
        place: a hook of Lightning, as "training_step" (a sanity check does not count), `WRITER` or `OUTSIDE`.
        deed: the name of a signal, "raise", "exit", "hold" (until the folder that it is given has a file `go`), "slow"
            (sleep for `seconds`, each time from now on), or `CLOCK`.
        count: on which passage.
    """

    place: str
    deed: str
    count: int = 1
    rank: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.deed} in {self.place}"


class Struck(Exception):
    """An error as if raised by a user's code."""


def do(strike: Strike, run_dir: Path, trainer: Any = None) -> None:
    """Do what a strike says to this process, a rank of this run."""
    if strike.deed == "raise":
        raise Struck("as the strike requests")
    if strike.deed == "exit":
        os._exit(0)
    if strike.deed == "slow":
        time.sleep(strike.seconds)
    elif strike.deed == "hold":
        while not (run_dir / "go").exists():
            time.sleep(0.05)
    elif strike.deed == CLOCK:
        resume = next(callback for callback in trainer.callbacks if hasattr(callback, "boundary"))
        resume.boundary.reasons.job_end = time.time()
    else:
        os.kill(os.getpid(), getattr(signal, strike.deed))


class Watch:
    """Count the passages of a strike's place in this process, and strike. `record` is written when it strikes."""

    def __init__(self, strike: Strike, record: Path) -> None:
        self.strike, self.record, self.count = strike, record, 0
        if strike.place == WRITER:
            for name in ("fsync", "rename", "replace", "symlink", "rmdir"):
                setattr(os, name, self._before_writing(getattr(os, name)))
            return
        from lightning.pytorch.trainer import call  # through these two Lightning calls the hooks of a module

        for name in ("_call_strategy_hook", "_call_lightning_module_hook"):
            setattr(call, name, self._before_hook(getattr(call, name)))

    def passes(self, trainer: Any = None) -> None:
        self.count += 1
        if self.count == self.strike.count or (self.strike.deed == "slow" and self.count > self.strike.count):
            self.record.touch()
            do(self.strike, self.record.parent, trainer)

    def _before_hook(self, call: Any) -> Any:
        def with_strike(trainer: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
            if hook == self.strike.place and not trainer.sanity_checking:
                self.passes(trainer)
            return call(trainer, hook, *args, **kwargs)

        return with_strike

    def _before_writing(self, call: Any) -> Any:
        def with_strike(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                self.passes()
            return call(*args, **kwargs)

        return with_strike
