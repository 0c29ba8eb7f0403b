"""A study as a file: one JSON line per operation, read again by whoever wants to know. Nothing in it is executed."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend, JournalFileOpenLock

from hpc.system.files import open_for_append, open_regular_file, parse_json

PATIENCE = 30  # seconds


class Journal(BaseJournalBackend):
    """What Optuna's JournalStorage writes and reads. A line that a crash or a full disk cut short counts as not said.

    Who writes holds `<path>.lock`, a file made with O_EXCL: safe on Lustre, GPFS and, from version 3 on, NFS, and in no
    need of flock, which some of them are mounted without. One as old as PATIENCE was left by the dead, and is taken
    away. (Not Optuna's lock by symbolic links: it shows the age of the journal instead of its own, so that of
    two processes which wait for a dead one, the second would take away the lock of the first.)
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.lock = JournalFileOpenLock(str(self.path), PATIENCE)
        self._places = {0: (0, 0)}  # number of a log -> a byte from which on it is the next, and the lines before that
        self.line = 0  # what was read last

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(log) + "\n" for log in logs).encode()
        self.lock.acquire()
        try:
            with open_for_append(self.path) as stream:
                stream.seek(max(stream.seek(0, os.SEEK_END) - 1, 0))
                whole = stream.read() in (b"", b"\n")
                stream.write(text if whole else b"\n" + text)
                stream.flush()
                os.fsync(stream.fileno())
        finally:
            with suppress(RuntimeError):  # taken away meanwhile, by somebody with less patience than this disk asks for
                self.lock.release()

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        number = max(known for known in self._places if known <= log_number_from)
        if not self.path.exists():
            return
        with open_regular_file(self.path) as stream:
            place, before = self._places[number]
            stream.seek(place)
            for self.line, line in enumerate(stream, before + 1):
                if (log := _read(line)) is not None:
                    number += 1
                    self._places[number] = (stream.tell(), self.line)
                    if number > log_number_from:
                        yield log


def _read(line: bytes) -> dict[str, Any] | None:
    """None: it is not whole, yet or for ever."""
    try:
        log = parse_json(line)
    except ValueError:
        return None
    return log if isinstance(log, dict) else None
