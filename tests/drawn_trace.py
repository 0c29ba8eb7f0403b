"""Record what each rank of a run does, and interrupt it: src/my_research/drawn_trace.py of the baked project.

TWIN_TRACE names the file of the record, with a JSON line per event. TWIN_STRIKE describes the interruption.
"""

import json
import os
import signal
import threading
import time
from typing import Any

import lightning as L

STRIKE = json.loads(os.environ.get("TWIN_STRIKE", "null"))
RANK = int(os.environ.get("PMI_RANK", 0))
counted: dict[str, int] = {}


class Struck(Exception):
    """An error as if raised by a user's code."""


def passes(where: str, trainer: L.Trainer | None = None) -> None:
    """Count how often this process passes a place, and interrupt it if TWIN_STRIKE names this place and count."""
    counted[where] = counted.get(where, 0) + 1
    if not STRIKE or STRIKE["rank"] != RANK or (where, counted[where]) != (STRIKE["where"], STRIKE["count"]):
        return
    write({"what": "struck"})
    if STRIKE["how"] == "raise":
        raise Struck("as TWIN_STRIKE requests")
    if STRIKE["how"] == "clock":  # the end of the job's wall time
        resume = next(callback for callback in trainer.callbacks if hasattr(callback, "boundary"))  # type: ignore
        resume.boundary.reasons.job_end = time.time()  # type: ignore
    else:
        os.kill(os.getpid(), getattr(signal, STRIKE["how"]))


def write(what: dict[str, Any]) -> None:
    """Write a line with one call, so that a killed process leaves only complete lines."""
    file = os.open(f"{os.environ['TWIN_TRACE']}.{RANK}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(what) + "\n").encode())
    os.close(file)


def watch_writer() -> None:
    """Make each sync or rename of a checkpoint file a place where the process can be interrupted."""
    for name in ("fsync", "rename", "replace", "symlink", "rmdir"):
        setattr(os, name, counting(getattr(os, name)))


def counting(before: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            passes("save")
        return before(*args, **kwargs)

    return call


if STRIKE and STRIKE["where"] == "save":
    watch_writer()
