"""Line charts, as SVG for pages that are light or dark, and as PNG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from math import ceil, isfinite
from pathlib import Path

from hpc.charts import drawing
from hpc.charts.axis import Axis, format_number, is_drawable, make_axis
from hpc.charts.drawing import XY, Box, Line, Mark, Text, text_width

NUM_COLOURS = 6


@dataclass(frozen=True)
class Series:
    """Points in the order in which a line joins them. A NaN or infinite value leaves a gap."""

    name: str
    points: Sequence[XY]
    style: str = "line"  # line, dashes, dots


@dataclass(frozen=True)
class Band:
    """A marked span of the x axis, which may lie beyond all points."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Chart:
    """Curves over one x axis. The labels say what the axes show, with units."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False  # begin a linear y axis at 0


def render_svg(chart: Chart, width: int = 640, *, height: int = 300) -> str:
    """Return an SVG element for a page, in the colours that the page's CSS variables give."""
    return drawing.render_svg(chart_marks(chart, width, height), width, height=height, label=describe(chart))


def write_png(charts: Sequence[Chart], path: Path, *, width: int = 640, height: int = 300) -> None:
    """Write a picture of the charts below each other. Raises `OSError`."""
    drawing.write_png([chart_marks(chart, width, height) for chart in charts], path, width=width, height=height)


def describe(chart: Chart) -> str:
    """Return the chart in words, for people who cannot see it."""
    parts = [f"{chart.title}: {chart.y_label} over {chart.x_label}"]
    for series in chart.series:
        if values := drawable_values(series, chart):
            parts.append(f"{series.name} from {format_number(values[0])} to {format_number(values[-1])}, "
                         f"at least {format_number(min(values))}, at most {format_number(max(values))}")  # fmt: skip
        if note := nonfinite_note(series, chart):
            parts.append(f"{series.name}: {note}")
    return ". ".join(parts if len(parts) > 1 else [*parts, "no data"])


def drawable_values(series: Series, chart: Chart) -> list[float]:
    """Return the y values of those points that the chart can show."""
    return [y for x, y in series.points if is_drawable(x, chart.log_x) and is_drawable(y, chart.log_y)]


def nonfinite_note(series: Series, chart: Chart) -> str:
    """Return from which step to its end a series is NaN or infinite; empty if its last value is finite."""
    if chart.x_label != "step":
        return ""
    tail = list(takewhile(lambda point: not isfinite(point[1]), reversed(series.points)))
    return f"NaN or infinite from step {tail[-1][0]:.0f} on" if tail else ""


def chart_marks(chart: Chart, width: int, height: int) -> list[Mark]:
    """Return what is drawn, in pixels from the upper left corner."""
    lines = [(series, line) for series in chart.series for line in _gapless_lines(series, chart, 2 * width)]
    points = [point for _, line in lines for point in line]
    colours = _colours(chart)
    legend, top = _legend(chart, colours, width)
    frame = _frame(chart, points, top, width=width, height=height)
    no_data = Text(((frame.left + width) / 2, (top + height) / 2 - 20), "no data", anchor="middle")
    return [
        Text((8, 20), chart.title, "text", bold=True),
        *legend,
        *_band_marks(chart, colours, frame),
        *(_grid(chart, frame) if points else [no_data]),
        *(mark for series, line in lines for mark in _line_marks(series, line, colours[series.name], frame)),
    ]


def _frame(chart: Chart, points: Sequence[XY], top: float, *, width: int, height: int) -> "Frame":
    """Return the axes for these points, and the rectangle between them."""
    heights = [y for _, y in points] + [0.0] * (chart.from_zero and not chart.log_y and bool(points))
    vertical = make_axis(heights, max(2, int(height - top - 40) // 36), log=chart.log_y, to_ticks=True)
    left = 16.0 + text_width(max((label for _, label in vertical.ticks), key=len, default=""))
    # The x axis also holds the steps at which a value is NaN.
    steps = [x for series in chart.series for x, _ in series.points if is_drawable(x, chart.log_x)]
    ends = steps + [x for band in _drawable_bands(chart) for x in (band.begin, band.end)]
    horizontal = make_axis(ends, max(2, int(width - left) // 80), log=chart.log_x)
    return Frame(horizontal, vertical, left=left, top=top, right=width - 24.0, bottom=height - 40.0)


@dataclass(frozen=True)
class Frame:
    """The rectangle between the axes, in pixels."""

    x: Axis
    y: Axis
    left: float
    top: float
    right: float
    bottom: float

    def pixel(self, point: XY) -> XY:
        return self.pixel_x(point[0]), self.bottom + self.y.position(point[1]) * (self.top - self.bottom)

    def pixel_x(self, x: float) -> float:
        return self.left + self.x.position(x) * (self.right - self.left)


def thin_points(points: Sequence[XY], max_points: int) -> list[XY]:
    """Return about `max_points` at most: the lowest and the highest of each stretch, so that no spike is lost."""
    stretch = ceil(2 * len(points) / max_points)
    if stretch <= 2:
        return list(points)
    kept = []
    for begin in range(0, len(points), stretch):
        indices = range(begin, min(begin + stretch, len(points)))
        ends = {min(indices, key=lambda i: points[i][1]), max(indices, key=lambda i: points[i][1])}
        kept += [points[index] for index in sorted(ends)]
    return kept


def _gapless_lines(series: Series, chart: Chart, max_points: int) -> Iterator[list[XY]]:
    """Yield the points of a series, cut where one cannot be drawn."""

    def has_place(point: XY) -> bool:
        return is_drawable(point[0], chart.log_x) and is_drawable(point[1], chart.log_y)

    for is_line, points in groupby(series.points, has_place):
        if is_line:
            yield thin_points(list(points), max_points)


def _colours(chart: Chart) -> dict[str, str]:
    """Return the colour of each name. Lines take the first colours, bands the last."""
    lines = dict.fromkeys(series.name for series in chart.series)
    bands = dict.fromkeys(band.name for band in chart.bands if band.name not in lines)
    return {name: f"series-{index % NUM_COLOURS + 1}" for index, name in enumerate(lines)} | {
        name: f"series-{NUM_COLOURS - index % NUM_COLOURS}" for index, name in enumerate(bands)
    }


def _legend(chart: Chart, colours: dict[str, str], width: int) -> tuple[list[Mark], float]:
    """Return the names with their colours, in as many rows as they need, with the y label below; and its lower edge."""
    x, y, entries = 8.0, 40.0, []
    styles = {series.name: series.style for series in chart.series}
    notes = {series.name: note for series in chart.series if (note := nonfinite_note(series, chart))}
    for name, colour in colours.items() if len(colours) > 1 or notes else ():
        text = ": ".join(filter(None, [name, notes.get(name)]))
        entry_width = 24 + text_width(text)
        if x > 8 and x + entry_width > width - 8:
            x, y = 8.0, y + 18
        entries += [_legend_key(styles.get(name), x, y - 4, colour), Text((x + 24, y), text)]
        x += entry_width + 16
    y += 22 if entries else 0
    return [*entries, Text((8, y), chart.y_label)], y + 12


def _legend_key(style: str | None, x: float, y: float, colour: str) -> Mark:
    """Return the sample of a line's style, or a box for a band (style None)."""
    if style is None:
        return Box((x, y - 5), (18, 10), colour)
    points = [(x + 9, y)] * 2 if style == "dots" else [(x, y), (x + 18, y)]
    return Line(points, colour, 5 if style == "dots" else 2, style == "dashes")


def _band_marks(chart: Chart, colours: dict[str, str], frame: Frame) -> Iterator[Mark]:
    for band in _drawable_bands(chart):
        begin, end = frame.pixel_x(band.begin), frame.pixel_x(band.end)
        if end - begin < 2:  # too short for a box: a line keeps it visible
            yield Line([(begin, frame.top), (begin, frame.bottom)], colours[band.name], 1.5)
        else:
            yield Box((begin, frame.top), (end - begin, frame.bottom - frame.top), colours[band.name])


def _drawable_bands(chart: Chart) -> list[Band]:
    return [band for band in chart.bands if is_drawable(band.begin, chart.log_x) and is_drawable(band.end, chart.log_x)]


def _grid(chart: Chart, frame: Frame) -> Iterator[Mark]:
    """Yield both axes with their ticks and labels."""
    for tick, label in frame.y.ticks:
        y = frame.pixel((frame.x.low, tick))[1]
        yield Line([(frame.left, y), (frame.right, y)], "line")
        yield Text((frame.left - 8, y + 4), label, anchor="end")
    for tick, label in frame.x.ticks:
        yield Line([(frame.pixel_x(tick), frame.bottom), (frame.pixel_x(tick), frame.bottom + 4)], "muted")
        yield Text((frame.pixel_x(tick), frame.bottom + 18), label, anchor="middle")
    yield Line([(frame.left, frame.bottom), (frame.right, frame.bottom)], "muted")
    yield Text((frame.right, frame.bottom + 34), chart.x_label, anchor="end")


def _line_marks(series: Series, points: list[XY], colour: str, frame: Frame) -> Iterator[Mark]:
    pixels = [frame.pixel(point) for point in points]
    if series.style == "dots" or len(pixels) == 1:
        yield from (Line([pixel, pixel], colour, 5) for pixel in pixels)
    else:
        yield Line(pixels, colour, 2, series.style == "dashes")
