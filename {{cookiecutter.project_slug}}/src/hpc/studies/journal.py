"""The storage of an Optuna study: a file with one JSON line per operation. Nothing in it is executed."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend, JournalFileOpenLock

from hpc.system.files import open_for_append, open_regular_file, parse_json

LOCK_GRACE_SECONDS = 30  # a lock that is older was left by a process that died


class Journal(BaseJournalBackend):
    """The file behind Optuna's `JournalStorage`. A line that a crash or a full disk has cut short is ignored.

    A writer holds `<path>.lock`, a file made with O_EXCL. That is safe on Lustre, GPFS and, from version 3 on, NFS, and
    needs no flock, without which some of them are mounted. A lock older than LOCK_GRACE_SECONDS is removed.

    Optuna's lock by symbolic links is not used: its age is that of the journal instead of its own. Of two processes
    that wait for a dead one, the second would remove the lock of the first.

    Attributes:
        line_number: of the line that was read last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.lock = JournalFileOpenLock(str(self.path), LOCK_GRACE_SECONDS)
        self._positions = {0: (0, 0)}  # number of logs -> the byte behind them, and the number of lines up to there
        self.line_number = 0

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append operations, on a line of their own even if the last line was cut short."""
        text = "".join(json.dumps(log) + "\n" for log in logs).encode()
        self.lock.acquire()
        try:
            with open_for_append(self.path) as stream:
                stream.seek(max(stream.seek(0, os.SEEK_END) - 1, 0))
                is_complete = stream.read() in (b"", b"\n")
                stream.write(text if is_complete else b"\n" + text)
                stream.flush()
                os.fsync(stream.fileno())
        finally:
            with suppress(RuntimeError):  # another process has removed the lock, as this disk was very slow
                self.lock.release()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Yield the operations from this number on."""
        num_logs = max(number for number in self._positions if number <= log_number_from)
        if not self.path.exists():
            return
        with open_regular_file(self.path) as stream:
            offset, num_lines = self._positions[num_logs]
            stream.seek(offset)
            for self.line_number, line in enumerate(stream, num_lines + 1):
                if (log := _parse_line(line)) is not None:
                    num_logs += 1
                    self._positions[num_logs] = (stream.tell(), self.line_number)
                    if num_logs > log_number_from:
                        yield log


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the operation of a line; None if the line is incomplete, because it is being written or was cut short."""
    try:
        log = parse_json(line)
    except ValueError:
        return None
    return log if isinstance(log, dict) else None
