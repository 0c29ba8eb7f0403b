"""Facts about processes, from Linux's /proc and from calls that only Linux has.

Other systems, such as macOS, lack these: there each function does what is possible.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def num_cores() -> int:
    """Return the number of CPUs that this process may use, or that the machine has if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def wait_for_signal(number: int, *, sender: int, blocked: Iterable[int]) -> None:
    """Wait until the process `sender` sends this signal, ignoring others of the blocked signals.

    Where the system does not tell who has sent a signal, any sender counts.
    """
    if not hasattr(signal, "sigwaitinfo"):
        while signal.sigwait(blocked) != number:
            pass
        return
    while (info := signal.sigwaitinfo(blocked)).si_pid != sender or info.si_signo != number:
        pass


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
    """Let the kernel kill this process when its parent ends, however the parent ends; only Linux does so."""
    PR_SET_PDEATHSIG = 1
    with suppress(AttributeError):  # the system has no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on, the state; the 20th of them is the start time in ticks."""
    # They follow the program's name, which stands in parentheses and may hold anything.
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
