"""A process beside a rank that ends it when none of its threads can run, as a call in C keeps the interpreter's lock.

A timer would run on while the rank is stopped (Ctrl-Z, scontrol suspend), and end it in the moment in which it goes on.
The guard is stopped as well, and counts its own looks. It runs this file, without the package.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

LOOK_SECONDS = 1.0


class Guard:
    """The guard of this process."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
        assert self._process.stdin
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    def extend(self, seconds: float) -> None:
        """Let the guard end this process if this is not called again for so long."""
        with suppress(OSError):  # somebody has killed the guard
            self._pipe.write(f"{seconds:.1f}\n".encode())

    def dismiss(self) -> None:
        """End the guard."""
        with suppress(OSError, subprocess.TimeoutExpired):
            self._pipe.close()
            self._process.wait(LOOK_SECONDS)


def _watch(rank: int) -> None:
    """Read limits in seconds from stdin; when one is over, let the rank print its stacks, and kill it."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    silent_seconds, limit = 0.0, float("inf")
    while silent_seconds < limit:
        if select.select([0], [], [], LOOK_SECONDS)[0]:
            if not (text := os.read(0, 65536)):
                return
            silent_seconds, limit = 0.0, float(text.split()[-1])
        elif os.getppid() != rank:  # a worker of the rank has outlived it, and keeps the pipe open
            return
        elif not _is_stopped(rank):
            silent_seconds += LOOK_SECONDS
    os.write(2, f"no thread of process {rank} has run for {limit:g} s: its stacks follow, then it is killed\n".encode())
    os.kill(rank, signal.SIGQUIT)
    time.sleep(LOOK_SECONDS)
    os.kill(rank, signal.SIGKILL)


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process; False without /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


if __name__ == "__main__":
    _watch(os.getppid())
