"""How fast a run was: from the windows of steps in its curves perf/, and from the samples of its nodes."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from hpc.monitor import event_files, node_usage
from hpc.monitor.event_files import RunCurves
from hpc.run import attempt_log

PARTS = ("step", "compute", "data", "other")  # perf/<part>_seconds


@dataclass(frozen=True)
class Measured:
    """Each number is a point of a curve: of the window of steps whose step time is the median. Times in seconds."""

    unit: str  # samples or tokens
    rate: float  # in that unit, per second, of all devices
    step: float
    compute: float
    data: float | None  # None, as is other: nobody has measured it
    other: float | None
    fast: float  # step times at the borders of the middle half of the windows
    slow: float
    windows: int
    metric: str  # of the test at the end, "" where there was none
    value: float | None
    gpu_percent: float | None  # mean over all GPUs while the run trained


def read(run_dir: Path) -> Measured | None:
    """None: the run has not trained long enough to leave two points of perf/step_seconds, or none of its rate."""
    curves = event_files.read_curves(*attempt_log.log_dirs(run_dir))
    windows = curves.points.get("perf/step_seconds", [])[1:]  # the first one is warm-up
    if not windows:
        return None
    ordered, quarter = sorted(seconds for _, seconds in windows), len(windows) // 4
    chosen = next(step for step, seconds in windows if seconds == median_low(ordered))
    step, compute, data, other = (dict(curves.points.get(f"perf/{part}_seconds", ())).get(chosen) for part in PARTS)
    unit = next((unit for unit in ("tokens", "samples") if f"perf/{unit}_per_second" in curves.points), "")
    rate = dict(curves.points.get(f"perf/{unit}_per_second", ())).get(chosen)
    if step is None or compute is None or rate is None:
        return None
    fast, slow = ordered[quarter], ordered[-1 - quarter]
    metric, value = last_metric(curves)
    use = gpu_percent(run_dir)
    return Measured(unit, rate, step, compute, data, other, fast, slow, len(windows), metric, value, use)


def last_metric(curves: RunCurves) -> tuple[str, float | None]:
    """Name and value of the test metric that says most: not the loss where there is another."""
    names = [name for name in curves.points if name.startswith("test/")]
    name = next((name for name in names if not name.endswith("loss")), names[-1] if names else "")
    return name, curves.points[name][-1][1] if name else None


def gpu_percent(run_dir: Path) -> float | None:
    """Mean use of all GPUs of all nodes while the run trained; None where nobody sampled it."""
    phases, found = node_usage.read_phases(run_dir), []
    for node in node_usage.read_nodes(run_dir)[0]:
        percent = node.gpu_percent()
        found += [percent[index] for index in node_usage.training_samples(node, phases) if percent]
    mean = node_usage.known_mean(found)
    return None if math.isnan(mean) else mean
