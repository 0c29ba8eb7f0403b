"""The stacks of this process's threads, in one line or in full."""

import os
import re
import sys
import threading
import traceback

WAITS_FOR_RANKS = "waits for other ranks"
# Where the main thread of a rank stands when it waits for others: collectives, and a backward that runs them.
COLLECTIVES = re.compile(
    r"/torch/(distributed/(?!checkpoint/filesystem)|autograd/graph\.py|nn/parallel/distributed\.py)"
)
LIBRARY = re.escape(os.path.dirname(os.__file__))
PLUMBING = re.compile(rf"-packages/torch/(?!utils/data/)|{LIBRARY}/(?!(site|dist)-packages/)|<frozen")


def describe_main_thread() -> str:
    """Return in one line what the main thread does: it waits for other ranks, or is stuck in some line of some file."""
    calls = [f"{file}:{line} {name}" for file, line, name in _stack(threading.main_thread().ident or 0)]
    first_own = next((number for number, call in enumerate(calls) if not PLUMBING.search(call)), len(calls))
    if is_distributed() and any(COLLECTIVES.search(call) for call in calls[:first_own]):
        return f"{WAITS_FOR_RANKS} (in {calls[0]})"
    return "stuck in " + ", called from ".join(dict.fromkeys([*calls[:1], *calls[first_own : first_own + 2]]))


def awaited_lock_file() -> str:
    """Return the lock file of a torch extension that the main thread waits for, or "". A killed process leaves it."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    for frame, _ in traceback.walk_stack(main) if main else ():
        if frame.f_code.co_filename.endswith("/torch/utils/file_baton.py"):
            return str(getattr(frame.f_locals.get("self"), "lock_file_path", ""))
    return ""


def is_in_collective(thread: int) -> bool:
    """Return whether this thread communicates with other ranks, or waits for them."""
    return any(file.endswith("/torch/distributed/distributed_c10d.py") for file, _, _ in _stack(thread))


def is_in_backward(thread: int) -> bool:
    """Return whether this thread computes gradients, or waits for those of other ranks."""
    return any(name == "_engine_run_backward" for _, _, name in _stack(thread))


def format_all_stacks() -> str:
    """Return the stacks of all threads, innermost calls first, the main thread last."""
    text = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is threading.main_thread()):
        lines = [f'  File "{file}", line {line}, in {name}\n' for file, line, name in _stack(thread.ident or 0)]
        text += [f"Thread {thread.name} (most recent call first):\n", *lines, "\n"]
    return "".join(text)


def _stack(thread: int) -> list[tuple[str, int, str]]:
    """Return file, line and function of each call, innermost first.

    It opens no source file, which may lie on a file system that no longer answers.
    """
    frame = sys._current_frames().get(thread)
    frames = traceback.walk_stack(frame) if frame else ()
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in frames]


def is_distributed() -> bool:
    """Return whether there are other ranks. torch is asked only if it is imported already."""
    torch = sys.modules.get("torch.distributed")
    return bool(torch and torch.is_available() and torch.is_initialized() and torch.get_world_size() > 1)
