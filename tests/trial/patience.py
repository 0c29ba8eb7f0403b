"""How long processes may take on a machine that is busy with others."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class Patience:
    """A deadline of some processes, in seconds.

    Those do not count in which one of them, or a process that it waits for, is ready to run and gets no processor: on a
    busy machine it has not hung in that time.
    """

    EVERY = 0.5  # seconds; a shorter life of a child is overlooked

    def __init__(self, pids: Sequence[int], seconds: float) -> None:
        self.pids, self.seconds = pids, seconds
        self.began = self.looked = time.monotonic()
        self._waits: dict[int, dict[int, float]] = {pid: {} for pid in pids}  # by process, that of each descendant

    def is_over(self) -> bool:
        now = time.monotonic()
        if now - self.began < self.seconds and now - self.looked < self.EVERY:
            return False
        if now - self.looked >= self.EVERY:
            self.looked = now
            self._look()
        waited = max((sum(waits.values()) for waits in self._waits.values()), default=0.0)
        return now - self.began > self.seconds + waited

    def _look(self) -> None:
        children = _children()
        for pid, waits in self._waits.items():
            family = [pid]
            for member in family:
                family += children.get(member, [])
                with suppress(OSError, IndexError):
                    waits[member] = int(Path(f"/proc/{member}/schedstat").read_text().split()[1]) / 1e9


def _children() -> dict[int, list[int]]:
    """Return the processes of this machine by their parents."""
    found: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                found[int(parent)].append(int(entry.name))
    return found
