"""The speed of a run, from its curves perf/ and the samples of its nodes."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from hpc.monitor import event_files, node_usage
from hpc.monitor.event_files import RunCurves
from hpc.run import attempt_log

PARTS = ("step", "compute", "data", "other")  # perf/<part>_seconds


@dataclass(frozen=True)
class RunRates:
    """The rate and the times of the window of steps whose step time is the median."""

    unit: str  # samples or tokens
    rate_per_second: float  # in that unit, of all devices
    step_seconds: float
    compute_seconds: float
    data_seconds: float | None  # None, like other_seconds: not measured
    other_seconds: float | None
    fast_step_seconds: float  # step times at the borders of the middle half of the windows
    slow_step_seconds: float
    num_windows: int
    metric: str  # of the test at the end; "": there was no test
    metric_value: float | None
    gpu_percent: float | None  # mean over all GPUs while the run trained


def read_rates(run_dir: Path) -> RunRates | None:
    """Return the speed of a run; None if it left fewer than two points of perf/step_seconds, or no rate."""
    curves = event_files.read_curves(*attempt_log.curve_folders(run_dir))
    windows = curves.points.get("perf/step_seconds", [])[1:]  # the first one is warm-up
    if not windows:
        return None
    ordered, quarter = sorted(seconds for _, seconds in windows), len(windows) // 4
    median_step = next(step for step, seconds in windows if seconds == median_low(ordered))
    times = [dict(curves.points.get(f"perf/{part}_seconds", ())).get(median_step) for part in PARTS]
    step, compute, data, other = times
    unit = next((unit for unit in ("tokens", "samples") if f"perf/{unit}_per_second" in curves.points), "")
    rate = dict(curves.points.get(f"perf/{unit}_per_second", ())).get(median_step)
    if step is None or compute is None or rate is None:
        return None
    metric, value = last_test_metric(curves)
    return RunRates(
        unit=unit,
        rate_per_second=rate,
        step_seconds=step,
        compute_seconds=compute,
        data_seconds=data,
        other_seconds=other,
        fast_step_seconds=ordered[quarter],
        slow_step_seconds=ordered[-1 - quarter],
        num_windows=len(windows),
        metric=metric,
        metric_value=value,
        gpu_percent=mean_gpu_percent(run_dir),
    )


def last_test_metric(curves: RunCurves) -> tuple[str, float | None]:
    """Return name and value of a metric of the test: the loss only if there is no other; ("", None) without a test."""
    names = [name for name in curves.points if name.startswith("test/")]
    name = next((name for name in names if not name.endswith("loss")), names[-1] if names else "")
    return name, curves.points[name][-1][1] if name else None


def mean_gpu_percent(run_dir: Path) -> float | None:
    """Return the mean utilization of all GPUs of all nodes while the run trained; None if it was not sampled."""
    phases, percents = node_usage.read_phases(run_dir), []
    for node in node_usage.read_nodes(run_dir)[0]:
        node_percents = node.gpu_percent()
        percents += [node_percents[index] for index in node_usage.indices_while_training(node, phases) if node_percents]
    mean = node_usage.known_mean(percents)
    return None if math.isnan(mean) else mean
