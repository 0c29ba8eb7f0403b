"""The speed of a run, from its curves perf/."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from hpc.monitor import event_files
from hpc.run import attempt_log


@dataclass(frozen=True)
class RunRates:
    """The rate and the step times of a run: those of the window of steps with the median step time."""

    unit: str  # samples or tokens
    rate_per_second: float  # in that unit, of all devices
    step_seconds: float
    compute_seconds: float | None  # None, like the following ones: not measured
    data_seconds: float | None
    other_seconds: float | None


def read_rates(run_dir: Path) -> RunRates | None:
    """Return the speed of a run; None if it left fewer than two points of perf/step_seconds, or no rate."""
    points = event_files.read_curves(*attempt_log.curve_folders(run_dir)).points
    windows = points.get("perf/step_seconds", [])[1:]  # the first one is warm-up
    unit = next((unit for unit in ("tokens", "samples") if f"perf/{unit}_per_second" in points), None)
    if not windows or unit is None:
        return None
    step_seconds = median_low(seconds for _, seconds in windows)
    median_step = next(step for step, seconds in windows if seconds == step_seconds)

    def at_median(name: str) -> float | None:
        return dict(points.get(f"perf/{name}", ())).get(median_step)

    rate = at_median(f"{unit}_per_second")
    parts = (at_median(f"{part}_seconds") for part in ("compute", "data", "other"))
    return None if rate is None else RunRates(unit, rate, step_seconds, *parts)
