"""Which process that is, so that another one with its number is not taken for it; since when, and how long it lives."""

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def identity(pid: int) -> list[Any] | None:
    """A process that lives: this boot, who asks from which container, its number, its start. None: it does not live.

    Read from Linux's /proc; where there is none, nothing is known of any process. It may hide those of other users.
    """
    try:
        # After the name, which may hold anything: state is field 3, the start time field 22.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] in "ZX":  # has ended, and its parent has not asked yet
            return None
        asks = f"{os.getuid()} in {os.readlink('/proc/self/ns/pid')}"
        return [BOOT_ID_FILE.read_text().strip(), asks, pid, fields[19]]
    except (OSError, IndexError):
        return None


def start_unix_time() -> float:
    """Unix time when this process was started, to a hundredth of a second; where there is no /proc, now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def io_bytes() -> int:
    """How much this process has read and written, whatever files; 0 where there is no /proc."""
    try:
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(counters["rchar"]) + int(counters["wchar"])
    except (OSError, ValueError, KeyError):
        return 0


def die_with_parent() -> None:
    """End when the parent ends, however it does: the kernel sees to it."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
