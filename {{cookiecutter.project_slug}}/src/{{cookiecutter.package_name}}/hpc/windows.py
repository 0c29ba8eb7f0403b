"""What a run has measured of itself, from its directory: speed, where a step's time went, use of GPUs, last metric."""

import csv
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median_low

Curves = Mapping[str, Mapping[int, tuple[float, float]]]  # tag → step → value, unix time when it was written
PARTS = ("step", "compute", "data", "other")  # perf/<part>_seconds


@dataclass(frozen=True)
class Measured:
    """Each number is a point of a curve: of the window of steps whose step time is the median. Times in seconds."""

    unit: str  # samples or tokens
    rate: float  # in that unit, per second, of all devices
    step: float
    compute: float
    data: float
    other: float
    fast: float  # step times at the borders of the middle half of the windows
    slow: float
    windows: int
    metric: str  # of the test at the end, "" where there was none
    value: float | None
    gpu_percent: float | None  # mean over all GPUs while these windows lasted


def read(run_dir: Path) -> Measured | None:
    """None: the run has not trained long enough to leave two points of perf/step_seconds."""
    lines = curves(run_dir / "tensorboard")
    steps = sorted(lines.get("perf/step_seconds", {}))[1:]  # the first window is warm-up
    if not steps:
        return None
    times = {step: lines["perf/step_seconds"][step][0] for step in steps}
    ordered, quarter = sorted(times.values()), len(steps) // 4
    chosen = next(step for step in steps if times[step] == median_low(ordered))
    step, compute, data, other = (lines[f"perf/{part}_seconds"][chosen][0] for part in PARTS)
    unit = next(unit for unit in ("tokens", "samples") if f"perf/{unit}_per_second" in lines)
    written = [when for _, when in lines["perf/step_seconds"].values()]
    metric, value = last_metric(lines)
    return Measured(
        unit, lines[f"perf/{unit}_per_second"][chosen][0], step, compute, data, other,
        ordered[quarter], ordered[-1 - quarter], len(steps), metric, value,
        gpu_percent(run_dir.glob("monitor/*.csv"), min(written), max(written)),
    )  # fmt: skip


def curves(folder: Path) -> Curves:
    """All scalars of a run. Of a file that a crash damaged, what stands before the damage: its reader ends there."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    lines: dict[str, dict[int, tuple[float, float]]] = defaultdict(dict)
    for file in sorted(folder.glob("events.out.tfevents.*")):  # their names begin with the time: the later one counts
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    lines[value.tag][event.step] = (value.simple_value, event.wall_time)
    return lines


def last_metric(lines: Curves) -> tuple[str, float | None]:
    """Name and value of the test metric that says most: not the loss where there is another."""
    names = [name for name in lines if name.startswith("test/")]
    name = next((name for name in reversed(names) if not name.endswith("loss")), names[-1] if names else "")
    return name, lines[name][max(lines[name])][0] if name else None


def gpu_percent(files: Iterable[Path], begin: float, end: float) -> float | None:
    """Mean use of all GPUs of all nodes between two unix times; None where nobody sampled it."""
    found = []
    for file in files:
        with file.open(encoding="utf-8", errors="replace", newline="") as stream:
            for row in csv.DictReader(stream):
                if begin <= (_number(row.get("time")) or 0) <= end:
                    found += [_number(row[name]) for name in row if re.fullmatch(r"gpu\d+_percent", str(name))]
    known = [value for value in found if value is not None]
    return fmean(known) if known else None


def _number(text: str | None) -> float | None:
    """Of a cell: an empty one is not known, and a crash may have cut the last line short."""
    try:
        return float(text) if text else None
    except ValueError:
        return None
