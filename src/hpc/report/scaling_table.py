"""The table of a scaling study and its charts: from points and curves perf/ of their runs to text, CSV and curves."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median_low

from hpc.charts.chart import Chart, Series
from hpc.monitor import event_files
from hpc.run import attempt_log
from hpc.studies.scaling_file import PointSizes
from hpc.system.tables import table_lines

PARTS = ("step", "compute", "data", "other")  # <part>_seconds of a row


@dataclass(frozen=True)
class RunRates:
    """The rate and the step times of a run: those of the window of steps with the median step time."""

    unit: str  # samples or tokens
    rate_per_second: float  # in that unit, of all devices
    step_seconds: float
    compute_seconds: float | None  # None, like the following ones: not measured
    data_seconds: float | None
    other_seconds: float | None


@dataclass(frozen=True)
class ScalingRow:
    """A point; None: not measured. The columns of scaling.csv have the names of these fields."""

    nodes: int
    devices: int
    global_batch_size: int | None
    learning_rate: float | None
    state: str
    unit: str | None = None
    rate_per_second: float | None = None
    efficiency: float | None = None  # rate per device, relative to the first measured point
    step_seconds: float | None = None
    compute_seconds: float | None = None
    data_seconds: float | None = None
    other_seconds: float | None = None


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


def make_rows(
    points: Sequence[PointSizes], states: Mapping[int, str], rates: Mapping[int, RunRates]
) -> list[ScalingRow]:
    """Return a row for each point.

    Args:
        states: of the runs, by number of nodes.
        rates: what was measured, by number of nodes.
    """
    rows, base = [], None
    for point in points:
        measured = rates.get(point.nodes)
        speed = asdict(measured) if measured else {}
        if measured:
            rate_per_device = measured.rate_per_second / point.devices
            base = base or rate_per_device
            speed["efficiency"] = rate_per_device / base
        rows.append(ScalingRow(**asdict(point), state=states[point.nodes], **speed))
    return rows


def format_rows(rows: Sequence[ScalingRow]) -> list[str]:
    """Return the table as lines for the terminal."""
    unit = next((row.unit for row in rows if row.unit), "samples")
    base = next((row.nodes for row in rows if row.efficiency is not None), rows[0].nodes if rows else 0)
    efficiency = "efficiency %" if not rows or base == rows[0].nodes else f"efficiency, % of nodes={base}"
    head = ["nodes", "devices", "batch", "lr", f"{unit}/s", efficiency, *(f"{part} ms" for part in PARTS), "state"]
    return table_lines(head, [_cells(row) for row in rows])


def to_csv(rows: Sequence[ScalingRow]) -> str:
    """Return the rows as CSV with all digits. An empty cell means unknown."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(ScalingRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def make_charts(rows: Sequence[ScalingRow]) -> list[Chart]:
    """Return the charts of the measured points: rate, efficiency, and the parts of a step."""
    rows = [row for row in rows if row.rate_per_second]
    first_rate = (rows[0].rate_per_second or 0) / rows[0].devices
    ideal = [(row.nodes, first_rate * row.devices) for row in rows]
    rate = [*_curve("measured", rows, field="rate_per_second"), Series("ideal", ideal, "dashes")]
    efficiency = [
        *_curve("measured", rows, field="efficiency", factor=100),
        Series("ideal", [(row.nodes, 100) for row in rows], "dashes"),
    ]
    parts = [series for part in PARTS for series in _curve(part, rows, field=f"{part}_seconds", factor=1000)]
    return [
        Chart("Rate", "nodes", f"{rows[0].unit} per second", rate, log_x=True, log_y=True),
        Chart("Efficiency", "nodes", f"% of nodes={rows[0].nodes}, per device", efficiency, log_x=True),
        Chart("A step", "nodes", "ms", parts, log_x=True, from_zero=True),
    ]


def _curve(name: str, rows: Sequence[ScalingRow], *, field: str, factor: float = 1) -> list[Series]:
    """Return a field over the nodes; no series if it was not measured."""
    points = [(row.nodes, factor * value) for row in rows if (value := getattr(row, field)) is not None]
    return [Series(name, points)] if points else []


def _cells(row: ScalingRow) -> list[str]:
    milliseconds = [_scaled(getattr(row, f"{part}_seconds"), 1000) for part in PARTS]
    sizes = [row.nodes, row.devices, row.global_batch_size, row.learning_rate, row.rate_per_second]
    short = [_scaled(row.efficiency, 100), *milliseconds]
    return [*map(format_number, sizes), *(format_number(value, 3) for value in short), row.state]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def format_number(value: float | None, num_digits: int = 4) -> str:
    """Return a number with so many significant digits. Large ones have all digits instead of an exponent."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10**num_digits else f"{value:.{num_digits}g}"
