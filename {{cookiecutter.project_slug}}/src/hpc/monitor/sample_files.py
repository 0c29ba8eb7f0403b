"""The files of a sampler: a table, and curves for TensorBoard. A sample is in them whole or not at all."""

import errno
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, float | int | None]


class Table:
    """A CSV file with a header, to which each start of a run appends."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, list(columns)
        self._file: int | None = None

    def add(self, row: Row) -> None:
        """An empty cell: not known. Raises `OSError`."""
        if self._file is None:
            self._file = self._opened()
        cells = ("" if (value := row.get(column)) is None else f"{round(value, 3)}" for column in self.columns)
        append(self._file, (",".join(cells) + "\n").encode())

    def first(self) -> float | None:
        """The first cell of the first row, if there is one."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as stream:
                return float((stream.readline() and stream.readline()).partition(",")[0])
        except (OSError, ValueError):
            return None

    def _opened(self) -> int:
        """The header is that of all starts together: with other GPUs there may be more columns than before."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]  # a crash may have cut the last line, whose numbers would be others
        lines = whole.decode(errors="replace").splitlines()
        there = lines[0].split(",") if lines else []
        more = [column for column in self.columns if column not in there]
        self.columns = [*there, *more]
        if more:
            padded = [",".join(self.columns), *(line + "," * len(more) for line in lines[1:])]
            aside = self.path.with_suffix(".part")
            aside.write_text("\n".join(padded) + "\n", encoding="utf-8")
            aside.replace(self.path)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not more and len(whole) < len(content):
            os.ftruncate(file, len(whole))
        return file


class Curves:
    """A file that TensorBoard reads: records of its `Event` messages, as TensorFlow's TFRecord frames them.

    TensorBoard's own writer would import numpy and five times as much code, and keep a thread.
    """

    def __init__(self, folder: Path) -> None:
        # Not at the top: training imports this module, too, and does without.
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self.folder = folder
        self._event: Any = event_pb2.Event  # type: ignore[attr-defined]
        self._summary: Any = summary_pb2.Summary  # type: ignore[attr-defined]
        self._file: int | None = None

    def add(self, time: float, step: int, values: Mapping[str, float | int | None]) -> None:
        """Scalars by name; None is left out. Raises `OSError`."""
        if self._file is None:
            self._file = self._opened(time)
        known = {name: value for name, value in values.items() if value is not None}
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in known.items()]
        event = self._event(wall_time=time, step=step, summary=self._summary(value=points))
        append(self._file, record(event.SerializeToString()))

    def _opened(self, time: float) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time:.0f}.{socket.gethostname()}.{os.getpid()}"
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        append(file, record(self._event(wall_time=time, file_version="brain.Event:2").SerializeToString()))
        return file


def append(file: int, data: bytes) -> None:
    """All of it or nothing. Raises `OSError`: on a full disk, say."""
    size = os.fstat(file).st_size
    try:
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(file, size)
        raise


def record(data: bytes) -> bytes:
    """Length, its checksum, the data, their checksum."""
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def crc32c(data: bytes) -> int:
    """The checksum of Castagnoli, RFC 3720 B.4; zlib's is another."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    """TFRecord's: checksums of data that hold checksums would be weak."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _of_byte(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


CRC32C = [_of_byte(value) for value in range(256)]
