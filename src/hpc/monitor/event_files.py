"""TensorBoard's files of curves: written by a node's sampler, and read as far as they can be. Imports no torch.

TensorBoard's own reader (2.21) ends at a damaged record, draws at random which points it keeps, and keeps both values
of a step that a resumed run repeats.
"""

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import IO, Any

from hpc.system.files import append_whole, open_regular_file

MAX_RECORD_BYTES = 2**16  # larger records, such as pictures and histograms, are skipped
MAX_RECORDS = 2_000_000  # reading them takes about 20 seconds
MAX_POINTS = 4000  # of a curve; when it has more, every second point is dropped
PROFILE_TAG = "profile/text_summary"  # the text that hpc/monitor/profile.py logs

PlotPoint = tuple[float, float]  # step or time, value


@dataclass
class Curve:
    """Values by step. If a step was logged twice, the later value counts.

    The curve is thinned evenly while it grows, but keeps its lowest, its highest and its last point.
    """

    values: dict[int, float] = field(default_factory=dict)
    low: PlotPoint | None = None
    high: PlotPoint | None = None
    last: PlotPoint | None = None
    num_added: int = 0
    stride: int = 1  # one of so many points is kept
    file: int = 0  # number of the file that the last point is from: each attempt writes its own

    def points(self) -> list[PlotPoint]:
        extremes = [point for point in (self.low, self.high, self.last) if point]
        return sorted((self.values | dict(extremes)).items())  # type: ignore[arg-type]

    def add(self, step: int, value: float, *, file: int = 0) -> None:
        if self.last and step <= self.last[0]:  # the run resumed from a checkpoint and repeats this step
            if file != self.file:  # what the attempt before made of the steps from here on was abandoned
                self.values = {earlier: kept for earlier, kept in self.values.items() if earlier < step}
            self.low, self.high = (
                extreme if extreme and extreme[0] < step else None for extreme in (self.low, self.high)
            )
        self.last, self.file = (step, value), file
        if isfinite(value):
            self.low = min(self.low or self.last, self.last, key=lambda point: point[1])
            self.high = max(self.high or self.last, self.last, key=lambda point: point[1])
        if self.num_added % self.stride == 0:
            self.values[step] = value
        self.num_added += 1
        if len(self.values) > MAX_POINTS:
            self.values, self.stride = dict(list(self.values.items())[::2]), 2 * self.stride


@dataclass
class RunCurves:
    """The curves of a run by tag. `notes` name what could not be read."""

    points: dict[str, list[PlotPoint]] = field(default_factory=dict)
    profile: str = ""  # the one-line summary of a profile, if there is one
    notes: list[str] = field(default_factory=list)

    def mean(self, tag: str) -> float | None:
        """Return the mean of the finite values; None if there are none."""
        values = [value for _, value in self.points.get(tag, []) if isfinite(value)]
        return sum(values) / len(values) if values else None

    def mean_rate(self, tag: str) -> float | None:
        """Return the mean of a rate per second, weighted by step time; None if nothing is known of it.

        Each point stands for a window of equally many steps, so that its step time says how long the window took.
        """
        step_seconds = dict(self.points.get("perf/step_seconds", []))
        weighted = [(value, step_seconds.get(step, 0.0)) for step, value in self.points.get(tag, []) if isfinite(value)]
        total = sum(seconds for _, seconds in weighted)
        return sum(value * seconds for value, seconds in weighted) / total if total > 0 else self.mean(tag)


def read_curves(*folders: Path) -> RunCurves:
    """Read the events files of these folders, without those of subfolders."""
    files, run = [file for folder in folders for file in folder.glob("events.out.tfevents.*")], RunCurves()
    files.sort(key=lambda file: file.name)  # their names begin with their time
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        run.notes += ["tensorboard is not installed, so no curve can be read"] if files else []
        return run
    curves: dict[str, Curve] = defaultdict(Curve)
    num_records = 0
    for number, file in enumerate(files):
        damaged = 0
        try:
            for event in _events(file, Event):
                damaged += event is None
                _add_event(event, curves, run, file=number)
                num_records += 1
                if num_records == MAX_RECORDS:
                    raise ValueError(f"there are more than {MAX_RECORDS} points")
        except ValueError as error:
            run.notes.append(f"{file.name}: {error}; the points before that are shown")
        except OSError as error:
            run.notes.append(f"{file.name} cannot be read: {error.strerror}")
        if damaged:
            run.notes.append(f"{file.name}: {damaged} damaged record(s) left out")
        if num_records == MAX_RECORDS:
            break
    run.points = {tag: curve.points() for tag, curve in sorted(curves.items())}
    return run


def _add_event(event: Any, curves: dict[str, Curve], run: RunCurves, *, file: int) -> None:
    for value in event.summary.value if event else ():
        if value.HasField("simple_value"):
            curves[value.tag].add(event.step, value.simple_value, file=file)
        elif value.tag == PROFILE_TAG and value.tensor.string_val:
            run.profile = value.tensor.string_val[0].decode(errors="replace").partition("\n")[0]


def _events(file: Path, event_class: Any) -> Iterator[Any]:
    """Yield the events of a file; None for a damaged one."""
    with open_regular_file(file) as stream:
        for data in _records(stream):
            try:
                yield None if data is None else event_class.FromString(data)
            except Exception:  # protobuf's errors differ between its implementations
                yield None


def _records(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the data of each record; None if they are damaged. Raises `ValueError` where the file is cut off.

    A record of TFRecord is the length, its checksum, the data, and their checksum.
    """
    end = stream.seek(0, 2)
    position = stream.seek(0)
    while position < end:
        head = stream.read(12)
        (length,) = struct.unpack("<Q", head[:8]) if len(head) == 12 else (end,)
        if len(head) == 12 and head[8:] != masked_checksum(head[:8]):
            raise ValueError("the length of a record is damaged")
        position += 12 + length + 4
        if position > end:
            raise ValueError("the file ends in the middle of a record")
        if length > MAX_RECORD_BYTES:
            stream.seek(position)
            continue
        data = stream.read(length + 4)
        yield data[:-4] if data[-4:] == masked_checksum(data[:-4]) else None


class ScalarWriter:
    """A writer of scalars for TensorBoard: records of its `Event` messages, framed as TensorFlow's TFRecord.

    TensorBoard's own writer would import numpy and five times as much code, and keep a thread.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self.folder = folder
        self._event: Any = event_pb2.Event  # type: ignore[attr-defined]
        self._summary: Any = summary_pb2.Summary  # type: ignore[attr-defined]
        self._file: int | None = None

    def add(self, time: float, step: int, values: Mapping[str, float | int | None]) -> None:
        """Append scalars by name, without those that are None. Raises `OSError`."""
        if self._file is None:
            self._file = self._open(time)
        scalars = {name: value for name, value in values.items() if value is not None}
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = self._event(wall_time=time, step=step, summary=self._summary(value=points))
        append_whole(self._file, tf_record(event.SerializeToString()))

    def _open(self, time: float) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time:.0f}.{socket.gethostname()}.{os.getpid()}"
        file = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        append_whole(file, tf_record(self._event(wall_time=time, file_version="brain.Event:2").SerializeToString()))
        return file


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
