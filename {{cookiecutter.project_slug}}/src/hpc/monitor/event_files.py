"""The curves that a run has left in TensorBoard's files, as far as they can be read. Imports no torch."""

import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import IO, Any

from hpc.monitor.sample_files import masked
from hpc.system.files import open_regular_file

LARGEST = 2**16  # bytes of a record; what is larger, as pictures and histograms, is passed over unread
MOST = 2_000_000  # records that are read: some 20 seconds
KEPT = 4000  # points of a curve; of more, every second one goes
PROFILE = "profile/text_summary"  # what hpc/monitor/profile.py has told

Point = tuple[float, float]  # step, value


@dataclass
class Curve:
    """Values by step; a step that was made twice counts as it was made last.

    Thinned evenly while it grows, but for the lowest, the highest and the last one.
    """

    values: dict[int, float] = field(default_factory=dict)
    low: Point | None = None
    high: Point | None = None
    last: Point | None = None
    seen: int = 0
    every: int = 1

    def points(self) -> list[Point]:
        kept = [point for point in (self.low, self.high, self.last) if point]
        return sorted((self.values | dict(kept)).items())  # type: ignore[arg-type]

    def add(self, step: int, value: float) -> None:
        if self.last and step <= self.last[0]:  # made again, after a checkpoint
            self.low, self.high = (one if one and one[0] < step else None for one in (self.low, self.high))
        self.last = (step, value)
        if isfinite(value):
            self.low = min(self.low or self.last, self.last, key=lambda point: point[1])
            self.high = max(self.high or self.last, self.last, key=lambda point: point[1])
        if self.seen % self.every == 0:
            self.values[step] = value
        self.seen += 1
        if len(self.values) > KEPT:
            self.values, self.every = dict(list(self.values.items())[::2]), 2 * self.every


@dataclass
class Curves:
    """By tag. `notes` say what could not be read."""

    points: dict[str, list[Point]] = field(default_factory=dict)
    profile: str = ""
    notes: list[str] = field(default_factory=list)

    def mean(self, tag: str) -> float | None:
        """Of the points that are numbers; None where there are none."""
        values = [value for _, value in self.points.get(tag, []) if isfinite(value)]
        return sum(values) / len(values) if values else None

    def rate(self, tag: str) -> float | None:
        """Of something per second over all windows of steps, each as long as it took; None where nothing is known."""
        seconds = dict(self.points.get("perf/step_seconds", []))
        known = [(value, seconds.get(step, 0.0)) for step, value in self.points.get(tag, []) if isfinite(value)]
        whole = sum(took for _, took in known)
        return sum(value * took for value, took in known) / whole if whole > 0 else self.mean(tag)


def read(*folders: Path) -> Curves:
    """What the events files of these folders hold, not those of the folders in them."""
    files, read = [file for folder in folders for file in folder.glob("events.out.tfevents.*")], Curves()
    files.sort(key=lambda file: file.name)  # their names begin with the time
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError:
        read.notes += ["tensorboard is not installed, so that no curve can be read"] if files else []
        return read
    curves: dict[str, Curve] = defaultdict(Curve)
    left = MOST
    for file in files:
        damaged = 0
        try:
            for event in _events(file, Event):
                damaged += event is None
                _add(curves, read, event)
                left -= 1
                if left == 0:
                    raise ValueError(f"more than {MOST} points in all")
        except ValueError as error:
            read.notes.append(f"{file.name}: {error}; what stands before that is shown")
        except OSError as error:
            read.notes.append(f"{file.name} cannot be read: {error.strerror}")
        if damaged:
            read.notes.append(f"{file.name}: {damaged} damaged record{'s' if damaged > 1 else ''} left out")
        if left == 0:
            break
    read.points = {tag: curve.points() for tag, curve in sorted(curves.items())}
    return read


def _add(curves: dict[str, Curve], read: Curves, event: Any) -> None:
    for value in event.summary.value if event else ():
        if value.HasField("simple_value"):
            curves[value.tag].add(event.step, value.simple_value)
        elif value.tag == PROFILE and value.tensor.string_val:
            read.profile = value.tensor.string_val[0].decode(errors="replace").partition("\n")[0]


def _events(file: Path, event: Any) -> Iterator[Any]:
    """None for one that is damaged."""
    with open_regular_file(file) as stream:
        for data in _records(stream):
            try:
                yield None if data is None else event.FromString(data)
            except Exception:  # protobuf's own, whichever of its implementations is installed
                yield None


def _records(stream: IO[bytes]) -> Iterator[bytes | None]:
    """Length, its checksum, the data, their checksum (TFRecord). Raises `ValueError` where the file is cut off.

    A record whose data are damaged comes as None.
    """
    end = stream.seek(0, 2)
    position = stream.seek(0)
    while position < end:
        head = stream.read(12)
        (length,) = struct.unpack("<Q", head[:8]) if len(head) == 12 else (end,)
        if len(head) == 12 and head[8:] != masked(head[:8]):
            raise ValueError("the length of a record is damaged")
        position += 12 + length + 4
        if position > end:
            raise ValueError("it ends in the middle of a record")
        if length > LARGEST:
            stream.seek(position)
            continue
        data = stream.read(length + 4)
        yield data[:-4] if data[-4:] == masked(data[:-4]) else None
