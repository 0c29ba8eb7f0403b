"""Where the threads of this process are."""

import os
import re
import sys
import threading
import traceback

WAITS = "waits for other ranks"
# Where the main thread of a rank stands when it waits for others: collectives, and a backward that runs them.
TOGETHER = re.compile(r"/torch/(distributed/(?!checkpoint/filesystem)|autograd/graph\.py|nn/parallel/distributed\.py)")
LIBRARY = re.escape(os.path.dirname(os.__file__))
PLUMBING = re.compile(rf"-packages/torch/(?!utils/data/)|{LIBRARY}/(?!(site|dist)-packages/)|<frozen")


def where() -> str:
    """What the main thread does, in one line: it waits for others, or is stuck in some line of some file."""
    inner = [f"{file}:{line} {name}" for file, line, name in _stack(threading.main_thread().ident or 0)]
    own = next((number for number, line in enumerate(inner) if not PLUMBING.search(line)), len(inner))
    if distributed() and any(TOGETHER.search(line) for line in inner[:own]):
        return f"{WAITS} (in {inner[0]})"
    return "stuck in " + ", called from ".join(dict.fromkeys([*inner[:1], *inner[own : own + 2]]))


def lock() -> str:
    """The lock file of a torch extension that the main thread waits for; "": none. Of a killed process it stays."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for frame, _ in traceback.walk_stack(main) if main else ():
        if frame.f_code.co_filename.endswith("/torch/utils/file_baton.py"):
            return str(getattr(frame.f_locals.get("self"), "lock_file_path", ""))
    return ""


def in_collective(thread: int) -> bool:
    """Does this thread talk to other ranks, or wait for them?"""
    return any(file.endswith("/torch/distributed/distributed_c10d.py") for file, _, _ in _stack(thread))


def everywhere() -> str:
    """What all threads do, innermost calls first, the main thread last."""
    text = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is threading.main_thread()):
        lines = [f'  File "{file}", line {line}, in {name}\n' for file, line, name in _stack(thread.ident or 0)]
        text += [f"Thread {thread.name} (most recent call first):\n", *lines, "\n"]
    return "".join(text)


def _stack(thread: int) -> list[tuple[str, int, str]]:
    """File, line and function, innermost first. Opens no file: the sources may lie where nothing answers any more."""
    frame = sys._current_frames().get(thread)
    frames = traceback.walk_stack(frame) if frame else ()
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def distributed() -> bool:
    """Are there other ranks? Asked of torch only where it is imported already."""
    torch = sys.modules.get("torch.distributed")
    return bool(torch and torch.is_available() and torch.is_initialized() and torch.get_world_size() > 1)
