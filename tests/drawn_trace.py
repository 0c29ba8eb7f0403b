"""What each rank of a twin did, and what happens to it: src/my_research/drawn_trace.py of the baked project.

TWIN_TRACE names the file for what was done, a JSON line for each thing; TWIN_STRIKE says what is to happen to whom.
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
    """What a researcher's own code may raise."""


def passes(where: str, trainer: L.Trainer | None = None) -> None:
    """This process comes by a place for another time; there it may be struck."""
    counted[where] = counted.get(where, 0) + 1
    if not STRIKE or STRIKE["rank"] != RANK or (where, counted[where]) != (STRIKE["where"], STRIKE["count"]):
        return
    write({"what": "struck"})
    if STRIKE["how"] == "raise":
        raise Struck("as told")
    if STRIKE["how"] == "clock":  # the end of the job's time has come
        next(callback for callback in trainer.callbacks if hasattr(callback, "end")).end = time.time()  # type: ignore
    else:
        os.kill(os.getpid(), getattr(signal, STRIKE["how"]))


def write(what: dict[str, Any]) -> None:
    """A line, with one call: a process that is killed leaves whole ones."""
    file = os.open(f"{os.environ['TWIN_TRACE']}.{RANK}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(what) + "\n").encode())
    os.close(file)


def watch_writer() -> None:
    """Each call with which a checkpoint is made durable or named is a place, too."""
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
