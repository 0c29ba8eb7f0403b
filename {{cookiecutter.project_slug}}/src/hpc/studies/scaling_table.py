"""The table of a scaling study: from its points and what their runs measured to rows, text and CSV. Pure."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from hpc.config.walltime import format_walltime
from hpc.jobs.job import Job
from hpc.studies.run_rates import RunRates
from hpc.studies.scaling_points import ScalingPoint, ScalingStudy

TIMES = ("step", "compute", "data", "other", "excess")  # <name>_seconds of a row


@dataclass(frozen=True)
class PredictedRate:
    """The prediction of plan.py for a point; None: unknown."""

    rate_per_second: float | None = None  # samples or tokens, of all devices
    step_seconds: float | None = None


@dataclass(frozen=True)
class ScalingRow:
    """A measured point. The columns of scaling.csv have the names of these fields."""

    nodes: int
    devices: int
    global_batch_size: int
    samples_per_device: float
    learning_rate: float | None
    steps: int
    windows: int
    unit: str
    rate_per_second: float
    planned_rate_per_second: float | None
    efficiency: float
    step_seconds: float
    fast_step_seconds: float
    slow_step_seconds: float
    planned_step_seconds: float | None
    compute_seconds: float
    data_seconds: float | None
    other_seconds: float | None
    excess_seconds: float
    gpu_percent: float | None
    metric: str
    value: float | None


def submission_table(study: ScalingStudy, points: Sequence[ScalingPoint], *, jobs: Sequence[Job]) -> list[str]:
    """Return the points that are to be submitted, and their cost, as lines for the terminal."""
    cells = [["nodes", "devices", "batch", "per device", "lr", "at most"]]
    for point, job in zip(points, jobs, strict=True):
        sizes = [point.num_nodes, point.num_devices, point.global_batch_size, point.samples_per_device, point.lr]
        cells.append([*map(format_number, sizes), format_walltime(job.walltime_seconds)])
    gpu_hours = sum(job.gpu_hours for job in jobs)
    cost = f", at most {format_number(gpu_hours, 3)} GPU-hours in all" if gpu_hours else ""
    return [f"{study.scaling} scaling, {study.steps} steps per point{cost}", *align_columns(cells)]


def make_rows(
    points: Sequence[ScalingPoint], rates: Mapping[int, RunRates], *, plans: Mapping[int, PredictedRate]
) -> list[ScalingRow]:
    """Return a row for each measured point. Efficiency and excess are relative to the first of them.

    Args:
        rates: what was measured, by number of nodes.
        plans: what plan.py predicts, by number of nodes.
    """
    measured = [point for point in points if point.num_nodes in rates]
    return [
        _make_row(
            point,
            rates[point.num_nodes],
            plan=plans.get(point.num_nodes, PredictedRate()),
            base=measured[0],
            base_rates=rates[measured[0].num_nodes],
        )
        for point in measured
    ]


def _make_row(
    point: ScalingPoint, rates: RunRates, *, plan: PredictedRate, base: ScalingPoint, base_rates: RunRates
) -> ScalingRow:
    base_rate_per_device = base_rates.rate_per_second / base.num_devices
    base_compute_seconds = base_rates.compute_seconds * point.samples_per_device / base.samples_per_device
    return ScalingRow(
        nodes=point.num_nodes,
        devices=point.num_devices,
        global_batch_size=point.global_batch_size,
        samples_per_device=point.samples_per_device,
        learning_rate=point.lr,
        steps=point.steps,
        windows=rates.num_windows,
        unit=rates.unit,
        rate_per_second=rates.rate_per_second,
        planned_rate_per_second=plan.rate_per_second,
        efficiency=rates.rate_per_second / point.num_devices / base_rate_per_device,
        step_seconds=rates.step_seconds,
        fast_step_seconds=rates.fast_step_seconds,
        slow_step_seconds=rates.slow_step_seconds,
        planned_step_seconds=plan.step_seconds,
        compute_seconds=rates.compute_seconds,
        data_seconds=rates.data_seconds,
        other_seconds=rates.other_seconds,
        excess_seconds=rates.compute_seconds - base_compute_seconds,
        gpu_percent=rates.gpu_percent,
        metric=rates.metric,
        value=rates.metric_value,
    )


def format_cells(rows: Sequence[ScalingRow]) -> list[list[str]]:
    """Return the titles, then the cells of each row; times in milliseconds."""
    metric = rows[0].metric.removeprefix("test/") or "metric"
    titles = ["nodes", "devices", "batch", "lr", f"{rows[0].unit}/s", "planned", "eff. %", *TIMES, "GPU %", metric]
    return [titles, *(_row_cells(row) for row in rows)]


def _row_cells(row: ScalingRow) -> list[str]:
    sizes = [row.nodes, row.devices, row.global_batch_size, row.learning_rate]
    rates = [row.rate_per_second, row.planned_rate_per_second]
    times = [getattr(row, f"{part}_seconds") for part in TIMES]
    milliseconds = [None if seconds is None else 1000 * seconds for seconds in times]
    short = [100 * row.efficiency, *milliseconds, row.gpu_percent]
    return [
        *map(format_number, [*sizes, *rates]),
        *(format_number(value, 3) for value in short),
        format_number(row.value),
    ]


def format_number(value: float | None, num_digits: int = 4) -> str:
    """Return a number with so many significant digits. Large ones have all digits and no exponent, to be compared."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10**num_digits else f"{value:.{num_digits}g}"


def align_columns(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the table as lines for the terminal."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def to_markdown(title: str, cells: Sequence[Sequence[str]], *, notes: Sequence[str]) -> str:
    """Return the table and its notes as a page of Markdown."""
    titles, *lines = ("| " + " | ".join(line) + " |" for line in cells)
    separator = "|" + "---:|" * len(cells[0])
    items = (f"- {note}".replace("\n", " ") for note in notes)
    return "\n".join([title, "", titles, separator, *lines, "", *items, ""])


def to_csv(rows: Sequence[ScalingRow]) -> str:
    """Return the rows as CSV with all digits. An empty cell means unknown."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(ScalingRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
