"""What a scaling study has found: its points and what their runs measured → rows → table, CSV, pictures. Pure."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from hpc.charts.chart import Chart, Series
from hpc.config.walltime import format_walltime
from hpc.jobs.job import Job
from hpc.studies.run_rates import Measured
from hpc.studies.scaling_points import Point, Study

TIMES = ("step", "compute", "data", "other", "excess")  # <name>_seconds of a row


@dataclass(frozen=True)
class Plan:
    """What plan.py predicts of a point; None: it does not know."""

    rate: float | None = None  # samples or tokens per second, of all devices
    step_seconds: float | None = None


@dataclass(frozen=True)
class Row:
    """A point that was measured. A row of the CSV file has these names."""

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


def asked(study: Study, points: Sequence[Point], jobs: Sequence[Job]) -> list[str]:
    """What is submitted, and what it may cost."""
    cells = [["nodes", "devices", "batch", "per device", "lr", "at most"]]
    for point, job in zip(points, jobs, strict=True):
        sizes = [point.nodes, point.devices, point.batch, point.per_device, point.lr]
        cells.append([*map(digits, sizes), format_walltime(job.walltime_seconds)])
    hours = sum(job.gpu_hours for job in jobs)
    cost = f", at most {digits(hours, 3)} GPU-hours in all" if hours else ""
    return [f"{study.scaling} scaling, {study.steps} steps per point{cost}", *aligned(cells)]


def rows(points: Sequence[Point], measured: Mapping[int, Measured], plans: Mapping[int, Plan]) -> list[Row]:
    """A row for each point that was measured; the first of them is what the others are held against.

    Args:
        measured, plans: by number of nodes.
    """
    done = [point for point in points if point.nodes in measured]
    return [_row(point, measured[point.nodes], plans.get(point.nodes, Plan()), done[0], measured) for point in done]


def _row(point: Point, found: Measured, plan: Plan, base: Point, measured: Mapping[int, Measured]) -> Row:
    first = measured[base.nodes]
    return Row(
        nodes=point.nodes,
        devices=point.devices,
        global_batch_size=point.batch,
        samples_per_device=point.per_device,
        learning_rate=point.lr,
        steps=point.steps,
        windows=found.windows,
        unit=found.unit,
        rate_per_second=found.rate,
        planned_rate_per_second=plan.rate,
        efficiency=(found.rate / point.devices) / (first.rate / base.devices),
        step_seconds=found.step,
        fast_step_seconds=found.fast,
        slow_step_seconds=found.slow,
        planned_step_seconds=plan.step_seconds,
        compute_seconds=found.compute,
        data_seconds=found.data,
        other_seconds=found.other,
        excess_seconds=found.compute - first.compute * point.per_device / base.per_device,
        gpu_percent=found.gpu_percent,
        metric=found.metric,
        value=found.value,
    )


def table(found: Sequence[Row]) -> list[list[str]]:
    """Titles, then a line of cells for each row; times in milliseconds."""
    metric = found[0].metric.removeprefix("test/") or "metric"
    titles = ["nodes", "devices", "batch", "lr", f"{found[0].unit}/s", "planned", "eff. %", *TIMES, "GPU %", metric]
    return [titles, *(_cells(row) for row in found)]


def _cells(row: Row) -> list[str]:
    sizes = [row.nodes, row.devices, row.global_batch_size, row.learning_rate]
    rates = [row.rate_per_second, row.planned_rate_per_second]
    times = [getattr(row, f"{part}_seconds") for part in TIMES]
    small = [100 * row.efficiency, *(None if time is None else 1000 * time for time in times), row.gpu_percent]
    return [*map(digits, [*sizes, *rates]), *(digits(value, 3) for value in small), digits(row.value)]


def digits(value: float | None, most: int = 4) -> str:
    """So many that count; no exponent for large numbers, which a person compares."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10**most else f"{value:.{most}g}"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """For the terminal."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def markdown(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The same as a page of Markdown."""
    titles, *lines = ("| " + " | ".join(line) + " |" for line in cells)
    rule = "|" + "---:|" * len(cells[0])
    items = (f"- {note}".replace("\n", " ") for note in notes)
    return "\n".join([title, "", titles, rule, *lines, "", *items, ""])


def as_csv(found: Sequence[Row]) -> str:
    """All digits. An empty cell: not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in found)
    return text.getvalue()


def charts(study: Study, found: Sequence[Row]) -> list[Chart]:
    """Rate, efficiency, and where a step's time goes; by nodes, with the plan beside what was measured."""
    first = found[0]
    devices = {row.nodes: row.devices / first.devices for row in found}
    measured = {row.nodes: row.rate_per_second for row in found}
    planned = {row.nodes: rate for row in found if (rate := row.planned_rate_per_second)}
    ideal = Series("ideal", [(nodes, first.rate_per_second * devices[nodes]) for nodes in devices], "dashes")
    rates = [*_joined("measured", measured), *_joined("planned", planned), ideal]
    shares = [*_joined("measured", {row.nodes: 100 * row.efficiency for row in found})]
    if first.nodes in planned:
        share = {nodes: 100 * rate / devices[nodes] / planned[first.nodes] for nodes, rate in planned.items()}
        shares += _joined("planned", share)
    shares.append(Series("ideal", [(nodes, 100) for nodes in devices], "dashes"))
    # An excess may lie below 0 by the noise of two measurements: as part of a time it is 0 then.
    times = {
        part: {row.nodes: max(1000 * time, 0) for row in found if (time := getattr(row, f"{part}_seconds")) is not None}
        for part in TIMES
    }
    parts = [series for part in TIMES for series in _joined(part, times[part])]
    title = f"{study.scaling.capitalize()} scaling"
    return [
        Chart(title, "nodes", f"{first.unit} per second", rates, log_x=True, log_y=True),
        Chart("Efficiency", "nodes", f"% of nodes={first.nodes}, per device", shares, log_x=True),
        Chart("A step", "nodes", "ms", parts, log_x=True, from_zero=True),
    ]


def _joined(name: str, points: Mapping[int, float]) -> list[Series]:
    """Points with a line through them; none where there are none."""
    at = list(points.items())
    return [Series(name, at), Series(name, at, "dots")] if at else []
