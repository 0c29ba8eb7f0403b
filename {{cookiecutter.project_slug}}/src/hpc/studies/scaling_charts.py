"""The charts of a scaling study: rate, efficiency, and the parts of a step, by number of nodes. Pure."""

from collections.abc import Mapping, Sequence

from hpc.charts.chart import Chart, Series
from hpc.studies.scaling_points import ScalingStudy
from hpc.studies.scaling_table import TIMES, ScalingRow


def make_charts(study: ScalingStudy, rows: Sequence[ScalingRow]) -> list[Chart]:
    """Return the charts, with the prediction of plan.py beside what was measured."""
    first = rows[0]
    parts = [series for part in TIMES for series in _line_with_dots(part, _part_milliseconds(rows, part))]
    title = f"{study.scaling.capitalize()} scaling"
    efficiency_label = f"% of nodes={first.nodes}, per device"
    return [
        Chart(title, "nodes", f"{first.unit} per second", _rate_series(rows), log_x=True, log_y=True),
        Chart("Efficiency", "nodes", efficiency_label, _efficiency_series(rows), log_x=True),
        Chart("A step", "nodes", "ms", parts, log_x=True, from_zero=True),
    ]


def _rate_series(rows: Sequence[ScalingRow]) -> list[Series]:
    first, relative_devices = rows[0], _relative_devices(rows)
    measured = {row.nodes: row.rate_per_second for row in rows}
    ideal = [(nodes, first.rate_per_second * relative) for nodes, relative in relative_devices.items()]
    return [
        *_line_with_dots("measured", measured),
        *_line_with_dots("planned", _planned_rates(rows)),
        Series("ideal", ideal, "dashes"),
    ]


def _efficiency_series(rows: Sequence[ScalingRow]) -> list[Series]:
    first, relative_devices = rows[0], _relative_devices(rows)
    series = _line_with_dots("measured", {row.nodes: 100 * row.efficiency for row in rows})
    planned = _planned_rates(rows)
    if first.nodes in planned:
        first_rate = planned[first.nodes]
        shares = {nodes: 100 * rate / relative_devices[nodes] / first_rate for nodes, rate in planned.items()}
        series += _line_with_dots("planned", shares)
    return [*series, Series("ideal", [(nodes, 100) for nodes in relative_devices], "dashes")]


def _relative_devices(rows: Sequence[ScalingRow]) -> dict[int, float]:
    """Return the number of devices of each point, relative to the first point."""
    return {row.nodes: row.devices / rows[0].devices for row in rows}


def _planned_rates(rows: Sequence[ScalingRow]) -> dict[int, float]:
    return {row.nodes: rate for row in rows if (rate := row.planned_rate_per_second)}


def _part_milliseconds(rows: Sequence[ScalingRow], part: str) -> dict[int, float]:
    """Return the time of a part of a step at each point that has measured it.

    The excess may be below 0 by the noise of two measurements; it is drawn as 0.
    """
    times = {row.nodes: getattr(row, f"{part}_seconds") for row in rows}
    return {nodes: max(1000 * seconds, 0) for nodes, seconds in times.items() if seconds is not None}


def _line_with_dots(name: str, points: Mapping[int, float]) -> list[Series]:
    """Return points with a line through them; nothing if there are no points."""
    positions = list(points.items())
    return [Series(name, positions), Series(name, positions, "dots")] if positions else []
