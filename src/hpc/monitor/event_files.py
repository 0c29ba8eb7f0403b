"""The curves of a run, from TensorBoard's files. Imports no torch.

TensorBoard's own accumulator (2.21) draws at random which points it keeps, and keeps both values of a step that a
resumed run repeats.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from hpc.system.files import open_regular_file

FRAME_BYTES = 16  # around each record: its length, and two checksums
MAX_RECORD_BYTES = 2**16  # larger records, such as pictures, are left out
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
    curves: dict[str, Curve] = defaultdict(Curve)
    num_records = 0
    for number, file in enumerate(files):
        try:
            for event in read_events(file):
                _add_event(event, curves, run, file=number)
                num_records += 1
                if num_records == MAX_RECORDS:
                    raise ValueError(f"there are more than {MAX_RECORDS} points")
        except ValueError as error:
            run.notes.append(f"{file.name}: {error}; the points before that are shown")
        except OSError as error:
            run.notes.append(f"{file.name} cannot be read: {error.strerror}")
        except ImportError:
            run.notes.append("tensorboard is not installed, so no curve can be read")
            break
        if num_records == MAX_RECORDS:
            break
    run.points = {tag: curve.points() for tag, curve in sorted(curves.items())}
    return run


def read_events(file: Path) -> Iterator[Any]:
    """Yield the events of a file.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the file cannot be opened, or is not regular.
        ValueError: at the end, if something damaged or cut off follows there, which the loader does not say.
    """
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    with open_regular_file(file) as stream:
        size = os.fstat(stream.fileno()).st_size
    position = 0
    try:
        for record in RawEventFileLoader(str(file)).Load():
            if len(record) <= MAX_RECORD_BYTES:
                yield Event.FromString(record)
            position += FRAME_BYTES + len(record)
    except Exception as error:  # TensorFlow's, protobuf's, or of memory if a length is wrong
        raise ValueError(f"damaged at byte {position} of {size}: {type(error).__name__}") from error
    if position < size:
        raise ValueError(f"damaged or cut off at byte {position} of {size}")


def _add_event(event: Any, curves: dict[str, Curve], run: RunCurves, *, file: int) -> None:
    for value in event.summary.value:
        if value.HasField("simple_value"):
            curves[value.tag].add(event.step, value.simple_value, file=file)
        elif value.tag == PROFILE_TAG and value.tensor.string_val:
            run.profile = value.tensor.string_val[0].decode(errors="replace").partition("\n")[0]
