"""A patch: this process is killed while it copies a file to the node."""

import os
import signal
from pathlib import Path

from hpc.packed import staging


def copy_half(source: Path, target: Path) -> None:
    with open(source, "rb") as there, open(target, "wb") as here:
        here.write(there.read(100))
    os.kill(os.getpid(), signal.SIGKILL)


staging.copy_file = copy_half
