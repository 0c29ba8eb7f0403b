"""What a scaling study has found: its points and what their runs measured → rows → table, CSV, pictures. Pure."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from .chart import Chart, Series
from .measured import Measured
from .study import Point, Study


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
    data_seconds: float
    other_seconds: float
    excess_seconds: float
    gpu_percent: float | None
    metric: str
    value: float | None


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
    titles = ["nodes", "devices", "batch", "lr", f"{found[0].unit}/s", "planned", "eff. %", "step"]
    titles += ["compute", "data", "other", "excess", "GPU %", metric]
    return [titles, *(_cells(row) for row in found)]


def _cells(row: Row) -> list[str]:
    sizes = [row.nodes, row.devices, row.global_batch_size, row.learning_rate]
    speed = [row.rate_per_second, row.planned_rate_per_second, 100 * row.efficiency]
    parts = [row.step_seconds, row.compute_seconds, row.data_seconds, row.other_seconds, row.excess_seconds]
    return [digits(value) for value in (*sizes, *speed, *(1000 * part for part in parts), row.gpu_percent, row.value)]


def digits(value: float | None) -> str:
    """Four of them, and never an exponent where a person compares."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """For the terminal."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def markdown(cells: Sequence[Sequence[str]]) -> list[str]:
    """The same as a table of Markdown."""
    titles, *lines = ("| " + " | ".join(line) + " |" for line in cells)
    return [titles, "|" + "---:|" * len(cells[0]), *lines]


def as_csv(found: Sequence[Row]) -> str:
    """All digits. An empty cell: not known."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in found)
    return text.getvalue()


def legend(study: Study, found: Sequence[Row]) -> list[str]:
    """What the columns are, and what they cannot tell apart."""
    first, windows = found[0], min(row.windows for row in found)
    smaller = " In strong scaling also what smaller batches per device cost." if study.scaling == "strong" else ""
    return [
        f"Times in ms: the median of {windows} windows or more of a run's perf/ curves, the first one left out.",
        f"eff.: {first.unit} per second and device, against those of nodes={first.nodes}.",
        f"excess: compute beyond that of nodes={first.nodes} for as many samples per device: communication between nodes "
        f"and waiting for the slowest rank.{smaller}",
    ]


def charts(study: Study, name: str, found: Sequence[Row]) -> list[Chart]:
    """Rate, efficiency, and where a step's time goes; by nodes, with the plan beside what was measured."""
    first, title = found[0], f"{name}, {study.scaling} scaling"
    ideal = [(row.nodes, first.rate_per_second * row.devices / first.devices) for row in found]
    rate = [Series("measured", [(row.nodes, row.rate_per_second) for row in found]), Series("ideal", ideal, "dashes")]
    share = [Series("measured", [(row.nodes, 100 * row.efficiency) for row in found])]
    if planned := [(row.nodes, row.planned_rate_per_second) for row in found if row.planned_rate_per_second]:
        rate.append(Series("planned", planned, "dots"))
    parts = ("step", "compute", "data", "other", "excess")
    split = [Series(part, [(row.nodes, 1000 * getattr(row, f"{part}_seconds")) for row in found]) for part in parts]
    unit = f"{first.unit} per second"
    return [
        Chart(title, "nodes", unit, rate, log_x=True, log_y=True),
        Chart(f"{title}: efficiency", "nodes", f"% of nodes={first.nodes}", share, log_x=True),
        Chart(f"{title}: a step", "nodes", "milliseconds", split, log_x=True),
    ]
