"""Where the main thread is, in one line."""

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
    """It waits for others, or is stuck in some line of some file."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inner = [f"{line.filename}:{line.lineno} {line.name}" for line in reversed(traceback.extract_stack(frame))]
    own = next((number for number, line in enumerate(inner) if not PLUMBING.search(line)), len(inner))
    if distributed() and any(TOGETHER.search(line) for line in inner[:own]):
        return f"{WAITS} (in {inner[0]})"
    return "stuck in " + ", called from ".join(dict.fromkeys([inner[0], *inner[own : own + 2]]))


def distributed() -> bool:
    """Are there other ranks? Asked of torch only where it is imported already."""
    torch = sys.modules.get("torch.distributed")
    return bool(torch and torch.is_available() and torch.is_initialized() and torch.get_world_size() > 1)
