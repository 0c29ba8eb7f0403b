"""Line charts as figures of plotly.js, and in words for people who cannot see them. Pure; plotly is not imported."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import takewhile
from math import ceil, isfinite
from textwrap import wrap
from typing import Any

from hpc.charts.units import format_si

Point = tuple[float, float]

MAX_POINTS = 3000  # of a series
MAX_MARKED_POINTS = 30  # a series of at most so many points has markers, so that a single point is visible
MAX_LABEL_LENGTH = 40  # characters per line; a phone has room for so many
MAX_TICKS = 8  # of a logarithmic x axis, for the same reason
MAX_DRAWN_VALUE = 1e40  # no fp32 number is as large, so a larger value comes from a damaged file and is not drawn
NUM_COLOURS = 6
NO_DATA = {"text": "no data", "xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}


@dataclass(frozen=True)
class Series:
    """Points in the order in which a line joins them. A NaN or infinite value leaves a gap."""

    name: str
    points: Sequence[Point]
    style: str = "line"  # line, dashes


@dataclass(frozen=True)
class Band:
    """A marked span of the x axis, which may lie beyond all points."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Chart:
    """Curves over one x axis. The labels say what the axes show, with units. Series of the same name share a colour."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False  # begin a linear y axis at 0


def describe(chart: Chart) -> str:
    """Return the chart in words."""
    parts = [f"{chart.title}: {chart.y_label} over {chart.x_label}"]
    for series in chart.series:
        if values := drawable_values(series, chart):
            parts.append(f"{series.name} from {format_si(values[0])} to {format_si(values[-1])}, "
                         f"at least {format_si(min(values))}, at most {format_si(max(values))}")  # fmt: skip
        if note := nonfinite_note(series, chart):
            parts.append(f"{series.name}: {note}")
    return ". ".join(parts if len(parts) > 1 else [*parts, "no data"])


def drawable_values(series: Series, chart: Chart) -> list[float]:
    """Return the y values of those points that the chart can show."""
    return [y for x, y in series.points if is_drawable(x, chart.log_x) and is_drawable(y, chart.log_y)]


def is_drawable(value: float, log: bool) -> bool:
    """Return False for NaN, infinite and absurdly large values, and for those without a logarithm if `log`."""
    return (1 / MAX_DRAWN_VALUE if log else -MAX_DRAWN_VALUE) < value < MAX_DRAWN_VALUE


def nonfinite_note(series: Series, chart: Chart) -> str:
    """Return from which step to its end a series is NaN or infinite; empty if its last value is finite."""
    if chart.x_label != "step":
        return ""
    tail = list(takewhile(lambda point: not isfinite(point[1]), reversed(series.points)))
    return f"NaN or infinite from step {tail[-1][0]:.0f} on" if tail else ""


def thin_points(points: Sequence[Point], max_points: int) -> list[Point]:
    """Return about `max_points` points: the lowest, the highest and one gap of each stretch, so that spikes stay."""
    stretch = ceil(3 * len(points) / max_points)
    if stretch <= 3:
        return list(points)
    kept = []
    for begin in range(0, len(points), stretch):
        indices = range(begin, min(begin + stretch, len(points)))
        finite = [index for index in indices if isfinite(points[index][1])] or [begin]
        gaps = [index for index in indices if not isfinite(points[index][1])][:1]
        ends = {min(finite, key=lambda i: points[i][1]), max(finite, key=lambda i: points[i][1])}
        kept += [points[index] for index in sorted(ends.union(gaps))]
    return kept


def make_figure(chart: Chart) -> dict[str, Any]:
    """Return data and layout for plotly.js. A colour is the name of a variable of the page's style."""
    lines = list(dict.fromkeys(series.name for series in chart.series))
    bands = [name for name in dict.fromkeys(band.name for band in chart.bands) if name not in lines]
    colours = {name: f"--series-{index % NUM_COLOURS + 1}" for index, name in enumerate(lines)}
    colours |= {name: f"--series-{NUM_COLOURS - index % NUM_COLOURS}" for index, name in enumerate(bands)}
    traces = [_trace(series, chart, colour=colours[series.name]) for series in chart.series]
    for index, series in enumerate(chart.series):  # the legend has one entry per name
        traces[index]["showlegend"] = series.name not in [before.name for before in chart.series[:index]]
    notes = [series for series in chart.series if nonfinite_note(series, chart)]
    has_data = any(drawable_values(series, chart) for series in chart.series)
    layout = {
        "title": {"text": f"<b>{_label(chart.title)}</b>", "subtitle": {"text": _label(chart.y_label)}},
        "xaxis": _x_axis(chart),
        "yaxis": _y_axis(chart),
        "shapes": [_band_shape(name, chart, colour=colour) for name, colour in colours.items() if name in bands],
        "showlegend": len(colours) > 1 or bool(notes),
        "annotations": [] if has_data else [NO_DATA],
    }
    return {"data": traces, "layout": layout}


def _label(text: str) -> str:
    """Break a label into lines, and escape it, as plotly.js would read `<b>` as bold."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    return "<br>".join(escape(line, quote=False) for line in wrap(printable, MAX_LABEL_LENGTH))


def _trace(series: Series, chart: Chart, *, colour: str) -> dict[str, Any]:
    points = [
        (x, y if is_drawable(y, chart.log_y) else float("nan")) for x, y in series.points if is_drawable(x, chart.log_x)
    ]
    points = thin_points(points, MAX_POINTS)
    has_markers = series.style == "line" and len(points) <= MAX_MARKED_POINTS
    return {
        "type": "scatter",
        "name": _label(": ".join(filter(None, [series.name, nonfinite_note(series, chart)]))),
        "legendgroup": _label(series.name),
        "x": [x for x, _ in points],
        "y": [y if y == y else None for _, y in points],
        "mode": "lines+markers" if has_markers else "lines",
        "line": {"color": colour, "width": 2, "dash": "dash" if series.style == "dashes" else "solid"},
        "marker": {"color": colour, "size": 6},
    }


def _x_axis(chart: Chart) -> dict[str, Any]:
    places = sorted({x for series in chart.series for x, _ in series.points if is_drawable(x, chart.log_x)})
    # Measured numbers of nodes, where plotly.js would choose 1, 2, 5.
    ticks = places[:: ceil(len(places) / MAX_TICKS) or 1]
    return {"title": {"text": _label(chart.x_label)}} | ({"type": "log", "tickvals": ticks} if chart.log_x else {})


def _y_axis(chart: Chart) -> dict[str, Any]:
    values = [abs(y) for series in chart.series for y in drawable_values(series, chart)]
    round_numbers = [factor * 10.0**power for power in range(-12, 16) for factor in (1, 2, 5)]
    linear = {"rangemode": "tozero" if chart.from_zero else "normal"}
    kind = {"type": "log", "tickvals": round_numbers} if chart.log_y else linear
    # 12k for large values, and 1e-4 instead of 100µ for small ones, such as a learning rate.
    return kind | {"exponentformat": "SI" if max(values, default=0) >= 1 else "e"}


def _band_shape(name: str, chart: Chart, *, colour: str) -> dict[str, Any]:
    """Return all bands of a name as one shape; its edge keeps a short band visible."""
    spans = [(band.begin, band.end) for band in chart.bands if band.name == name]
    boxes = [f"M{b!r},0V1H{e!r}V0Z" for b, e in spans if is_drawable(b, chart.log_x) and is_drawable(e, chart.log_x)]
    return {
        "type": "path",
        "path": "".join(boxes) or "M0,0",
        "yref": "y domain",
        "layer": "below",
        "fillcolor": colour,
        "opacity": 0.35,
        "line": {"color": colour, "width": 1},
        "name": _label(name),
        "showlegend": True,
    }
