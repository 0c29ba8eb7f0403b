"""Line charts, as SVG for pages that are light or dark, and as PNG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from math import ceil, isfinite
from pathlib import Path

from hpc.charts import drawing
from hpc.charts.axis import Axis, axis, drawable, number
from hpc.charts.drawing import Box, Line, Mark, Point, Text, length

SERIES = 6  # colours


@dataclass(frozen=True)
class Series:
    """Points in the order in which a line joins them; one that is no number leaves a gap."""

    name: str
    points: Sequence[Point]
    style: str = "line"  # line, dashes, dots


@dataclass(frozen=True)
class Band:
    """A marked span of x, also where there are no points."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Chart:
    """What is to be drawn; `x` and `y` say what the axes show, with units."""

    title: str
    x: str
    y: str
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False  # a linear y axis begins at 0


def svg(chart: Chart, width: int = 640, height: int = 300) -> str:
    """An element for a page, in the colours that its CSS variables give."""
    return drawing.svg(marks(chart, width, height), width, height, told(chart))


def png(charts: Sequence[Chart], path: Path, width: int = 640, height: int = 300) -> None:
    """The charts below each other."""
    drawing.png([marks(chart, width, height) for chart in charts], width, height, path)


def told(chart: Chart) -> str:
    """In words, for who does not see it."""
    parts = [f"{chart.title}: {chart.y} over {chart.x}"]
    for series in chart.series:
        values = [y for x, y in series.points if drawable(x, chart.log_x) and drawable(y, chart.log_y)]
        if values:
            parts.append(f"{series.name} from {number(values[0])} to {number(values[-1])}, "
                         f"at least {number(min(values))}, at most {number(max(values))}")  # fmt: skip
        if end := broken(series, chart):
            parts.append(f"{series.name} {end}")
    return ". ".join(parts if len(parts) > 1 else [*parts, "no data"])


def broken(series: Series, chart: Chart) -> str:
    """From which step on it is no number, up to its end; or nothing."""
    left = list(takewhile(lambda point: not isfinite(point[1]), reversed(series.points))) if chart.x == "step" else []
    return f"not finite from step {left[-1][0]:.0f} on" if left else ""


def marks(chart: Chart, width: int, height: int) -> list[Mark]:
    """The drawing, in pixels from the upper left corner."""
    lines = [(series, gapless) for series in chart.series for gapless in _gapless(series, chart, 2 * width)]
    points = [point for _, line in lines for point in line]
    colours = _colours(chart)
    legend, top = _legend(chart, colours, width)
    heights = [y for _, y in points] + [0.0] * (chart.from_zero and not chart.log_y and bool(points))
    vertical = axis(heights, max(2, int(height - top - 40) // 36), chart.log_y, to_ticks=True)
    left = 16.0 + length(max((name for _, name in vertical.ticks), key=len, default=""))
    steps = [x for series in chart.series for x, _ in series.points if drawable(x, chart.log_x)]  # also of no number
    ends = steps + [x for band in _drawable(chart) for x in (band.begin, band.end)]
    horizontal = axis(ends, max(2, int(width - left) // 80), chart.log_x)
    frame = Frame(horizontal, vertical, left, top, width - 24.0, height - 40.0)
    nothing = [] if points else [Text(((left + width) / 2, (top + height) / 2 - 20), "no data", anchor="middle")]
    return [
        Text((8, 20), chart.title, "text", bold=True),
        *legend,
        *_bands(chart, colours, frame),
        *(nothing or _grid(chart, frame)),
        *(mark for series, line in lines for mark in _series(series, line, colours[series.name], frame)),
    ]


@dataclass(frozen=True)
class Frame:
    """The rectangle between the axes, in pixels."""

    x: Axis
    y: Axis
    left: float
    top: float
    right: float
    bottom: float

    def at(self, point: Point) -> Point:
        return self.across(point[0]), self.bottom + self.y.at(point[1]) * (self.top - self.bottom)

    def across(self, x: float) -> float:
        return self.left + self.x.at(x) * (self.right - self.left)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """About `most` points at most, the lowest and the highest of each stretch: no spike is lost."""
    stretch = ceil(2 * len(points) / most)
    if stretch <= 2:
        return list(points)
    kept = []
    for begin in range(0, len(points), stretch):
        indices = range(begin, min(begin + stretch, len(points)))
        ends = {min(indices, key=lambda i: points[i][1]), max(indices, key=lambda i: points[i][1])}
        kept += [points[index] for index in sorted(ends)]
    return kept


def _gapless(series: Series, chart: Chart, most: int) -> Iterator[list[Point]]:
    for good, points in groupby(series.points, lambda p: drawable(p[0], chart.log_x) and drawable(p[1], chart.log_y)):
        if good:
            yield thinned(list(points), most)


def _colours(chart: Chart) -> dict[str, str]:
    """Of each name; lines take the first colours, bands the last."""
    lines = dict.fromkeys(series.name for series in chart.series)
    bands = dict.fromkeys(band.name for band in chart.bands if band.name not in lines)
    return {name: f"series-{index % SERIES + 1}" for index, name in enumerate(lines)} | {
        name: f"series-{SERIES - index % SERIES}" for index, name in enumerate(bands)
    }


def _legend(chart: Chart, colours: dict[str, str], width: int) -> tuple[list[Mark], float]:
    """The names with their colours, in as many rows as they need, the y axis's label below; and where that ends."""
    x, y, drawn = 8.0, 40.0, []
    styles = {series.name: series.style for series in chart.series}
    ends = {series.name: end for series in chart.series if (end := broken(series, chart))}
    for name, colour in colours.items() if len(colours) > 1 or ends else ():
        text = " ".join(filter(None, [name, ends.get(name)]))
        wide = 24 + length(text)
        if x > 8 and x + wide > width - 8:
            x, y = 8.0, y + 18
        drawn += [_key(styles.get(name), x, y - 4, colour), Text((x + 24, y), text)]
        x += wide + 16
    y += 22 if drawn else 0
    return [*drawn, Text((8, y), chart.y)], y + 12


def _key(style: str | None, x: float, y: float, colour: str) -> Mark:
    if style is None:
        return Box((x, y - 5), (18, 10), colour)
    points = [(x + 9, y)] * 2 if style == "dots" else [(x, y), (x + 18, y)]
    return Line(points, colour, 5 if style == "dots" else 2, style == "dashes")


def _bands(chart: Chart, colours: dict[str, str], frame: Frame) -> Iterator[Mark]:
    for band in _drawable(chart):
        begin, end = frame.across(band.begin), frame.across(band.end)
        if end - begin < 2:  # however short, it is seen
            yield Line([(begin, frame.top), (begin, frame.bottom)], colours[band.name], 1.5)
        else:
            yield Box((begin, frame.top), (end - begin, frame.bottom - frame.top), colours[band.name])


def _drawable(chart: Chart) -> list[Band]:
    return [band for band in chart.bands if drawable(band.begin, chart.log_x) and drawable(band.end, chart.log_x)]


def _grid(chart: Chart, frame: Frame) -> Iterator[Mark]:
    for tick, name in frame.y.ticks:
        y = frame.at((frame.x.low, tick))[1]
        yield Line([(frame.left, y), (frame.right, y)], "line")
        yield Text((frame.left - 8, y + 4), name, anchor="end")
    for tick, name in frame.x.ticks:
        yield Line([(frame.across(tick), frame.bottom), (frame.across(tick), frame.bottom + 4)], "muted")
        yield Text((frame.across(tick), frame.bottom + 18), name, anchor="middle")
    yield Line([(frame.left, frame.bottom), (frame.right, frame.bottom)], "muted")
    yield Text((frame.right, frame.bottom + 34), chart.x, anchor="end")


def _series(series: Series, line: list[Point], colour: str, frame: Frame) -> Iterator[Mark]:
    at = [frame.at(point) for point in line]
    if series.style == "dots" or len(at) == 1:
        yield from (Line([point, point], colour, 5) for point in at)
    else:
        yield Line(at, colour, 2, series.style == "dashes")
