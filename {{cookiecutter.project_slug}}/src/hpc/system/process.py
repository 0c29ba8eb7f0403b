"""Identity, start time and traffic of a process, read from Linux's /proc."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def identity(pid: int) -> list[Any] | None:
    """Return what tells a live process from a later one that has its number; None if it is not alive.

    The list holds the id of this boot, the user and the pid namespace of the caller, the number and the start time.
    Without /proc no process is known. /proc may hide the processes of other users.
    """
    try:
        fields = _stat_fields(pid)
        if fields[0] in "ZX":  # the process has ended, and its parent has not collected the exit code yet
            return None
        observer = f"{os.getuid()} in {os.readlink('/proc/self/ns/pid')}"
        return [BOOT_ID_FILE.read_text().strip(), observer, pid, fields[19]]
    except (OSError, IndexError):
        return None


def start_unix_time() -> float:
    """Return when this process was started, as Unix time to a hundredth of a second; without /proc, the time now."""
    try:
        ticks = int(_stat_fields("self")[19])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def io_bytes() -> int:
    """Return how many bytes this process has read and written, in whatever files; 0 without /proc."""
    try:
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counters["rchar"]) + int(counters["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however the parent ends."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, the state; the 20th of them is the start time in ticks."""
    # They follow the program's name, which stands in parentheses and may hold anything.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
