"""The files of a sampler: a table, and curves for TensorBoard. A sample is written completely or not at all."""

import errno
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Sample = Mapping[str, float | int | None]  # by column; None: unknown


class SampleTable:
    """A CSV file with a header, to which each attempt at a run appends."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, list(columns)
        self._file: int | None = None

    def add(self, sample: Sample) -> None:
        """Append a row, with empty cells for unknown values. Raises `OSError`."""
        if self._file is None:
            self._file = self._open()
        cells = ("" if (value := sample.get(column)) is None else f"{round(value, 3)}" for column in self.columns)
        append_whole(self._file, (",".join(cells) + "\n").encode())

    def first_time(self) -> float | None:
        """Return the first cell of the first row; None if there is no row."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as stream:
                return float((stream.readline() and stream.readline()).partition(",")[0])
        except (OSError, ValueError):
            return None

    def _open(self) -> int:
        """Open the file, and extend its header if this attempt has columns (other GPUs) that are new."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]  # a crash may have cut a number of the last line in half
        lines = complete.decode(errors="replace").splitlines()
        columns = lines[0].split(",") if lines else []
        new_columns = [column for column in self.columns if column not in columns]
        self.columns = [*columns, *new_columns]
        if new_columns:
            padded = [",".join(self.columns), *(line + "," * len(new_columns) for line in lines[1:])]
            temporary = self.path.with_suffix(".part")
            temporary.write_text("\n".join(padded) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not new_columns and len(complete) < len(content):
            os.ftruncate(file, len(complete))
        return file


class ScalarWriter:
    """A writer of scalars for TensorBoard: records of its `Event` messages, framed as TensorFlow's TFRecord.

    TensorBoard's own writer would import numpy and five times as much code, and keep a thread.
    """

    def __init__(self, folder: Path) -> None:
        # Imported here, because training imports this module, too, but writes no scalars with it.
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self.folder = folder
        self._event: Any = event_pb2.Event  # type: ignore[attr-defined]
        self._summary: Any = summary_pb2.Summary  # type: ignore[attr-defined]
        self._file: int | None = None

    def add(self, time: float, step: int, values: Mapping[str, float | int | None]) -> None:
        """Append scalars by name, without those that are None. Raises `OSError`."""
        if self._file is None:
            self._file = self._open(time)
        known = {name: value for name, value in values.items() if value is not None}
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in known.items()]
        event = self._event(wall_time=time, step=step, summary=self._summary(value=points))
        append_whole(self._file, tf_record(event.SerializeToString()))

    def _open(self, time: float) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time:.0f}.{socket.gethostname()}.{os.getpid()}"
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        append_whole(file, tf_record(self._event(wall_time=time, file_version="brain.Event:2").SerializeToString()))
        return file


def append_whole(file: int, data: bytes) -> None:
    """Append all of the data or nothing. Raises `OSError`, on a full disk for example."""
    size = os.fstat(file).st_size
    try:
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.ftruncate(file, size)
        raise


def tf_record(data: bytes) -> bytes:
    """Return a TFRecord: the length, its checksum, the data, their checksum."""
    length = struct.pack("<Q", len(data))
    return length + masked_checksum(length) + data + masked_checksum(data)


def crc32c(data: bytes) -> int:
    """Return the checksum of Castagnoli (RFC 3720, B.4), which differs from zlib's."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked_checksum(data: bytes) -> bytes:
    """Return TFRecord's masked CRC-32C: a plain checksum is weak for data that contain checksums."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _crc32c_of_byte(value: int) -> int:
    for _ in range(8):
        value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


CRC32C = [_crc32c_of_byte(value) for value in range(256)]
