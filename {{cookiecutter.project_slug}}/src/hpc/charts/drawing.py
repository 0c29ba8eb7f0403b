"""Lines, boxes and texts, drawn as SVG or as PNG. Pillow is imported for the PNG only."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import dist
from pathlib import Path
from typing import Any

XY = tuple[float, float]  # of a mark: pixels from the upper left corner

# The colours of Okabe and Ito, which colour-blind people can tell apart. A page sets others as CSS variables.
COLOURS = {
    "text": "#1b1b1b", "muted": "#595959", "line": "#dcdcdc", "series-1": "#0072b2", "series-2": "#d55e00",
    "series-3": "#009e73", "series-4": "#cc79a7", "series-5": "#e69f00", "series-6": "#56b4e9",
}  # fmt: skip
TEXT_SIZE = 12  # pixels
SCALE = 4  # pixels that the PNG draws for one of the SVG; it is then halved, which smooths its lines
DASH, GAP = 6, 4
BOX_OPACITY = 0.35


@dataclass(frozen=True)
class Line:
    """A line through points; two equal points make a dot."""

    points: Sequence[XY]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Box:
    """A filled rectangle, through which the marks behind it can be seen."""

    corner: XY
    size: XY
    colour: str


@dataclass(frozen=True)
class Text:
    """A line of text."""

    position: XY  # of its anchor, on its base line
    text: str
    colour: str = "muted"
    anchor: str = "start"  # start, middle, end
    bold: bool = False


Mark = Line | Box | Text


def text_width(text: str) -> float:
    """Return the pixels that a text takes at most in common fonts."""
    return 0.58 * TEXT_SIZE * len(text)


def render_svg(marks: Sequence[Mark], width: int, *, height: int, label: str) -> str:
    """Return an SVG element for a page; screen readers read `label` aloud."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    style = (
        f'font-family="system-ui, sans-serif" font-size="{TEXT_SIZE}" stroke-linecap="round" stroke-linejoin="round"'
    )
    return f'{head} {style} aria-label="{_escape(label)}">{"".join(map(_element, marks))}</svg>'


def write_png(pictures: Sequence[Sequence[Mark]], path: Path, *, width: int, height: int) -> None:
    """Write the pictures below each other, on white, in twice the pixels of the SVG. Raises `OSError`."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width * SCALE, height * SCALE * len(pictures)), "white")
    draw, font = ImageDraw.Draw(image, "RGBA"), ImageFont.load_default(TEXT_SIZE * SCALE)
    for index, marks in enumerate(pictures):
        for mark in marks:
            _draw_mark(draw, font, mark, top=index * height)
    image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS).save(path)


def _element(mark: Mark) -> str:
    colour = f"var(--{mark.colour},{COLOURS[mark.colour]})"
    if isinstance(mark, Text):
        bold = ' font-weight="600"' if mark.bold else ""
        place = f'x="{mark.position[0]:.1f}" y="{mark.position[1]:.1f}" text-anchor="{mark.anchor}"'
        return f'<text {place}{bold} style="fill:{colour}">{_escape(mark.text)}</text>'
    if isinstance(mark, Box):
        (x, y), (width, height) = mark.corner, mark.size
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        return f'<rect {box} style="fill:{colour};fill-opacity:{BOX_OPACITY}"/>'
    dashes = f";stroke-dasharray:{DASH} {GAP}" if mark.dashed else ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
    return f'<polyline points="{points}" style="fill:none;stroke:{colour};stroke-width:{mark.width:g}{dashes}"/>'


def _escape(text: str) -> str:
    return escape("".join(char if char.isprintable() else " " for char in text))


def _draw_mark(draw: Any, font: Any, mark: Mark, *, top: float) -> None:
    colour = COLOURS[mark.colour]
    if isinstance(mark, Text):
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[mark.anchor]
        bold = SCALE / 5 if mark.bold else 0
        draw.text(_pixels(mark.position, top), mark.text, colour, font, anchor, stroke_width=bold)
    elif isinstance(mark, Box):
        end = (mark.corner[0] + mark.size[0], mark.corner[1] + mark.size[1])
        draw.rectangle([_pixels(mark.corner, top), _pixels(end, top)], f"{colour}{round(255 * BOX_OPACITY):02x}")
    else:
        for points in _dashes(mark.points) if mark.dashed else [mark.points]:
            _draw_line(draw, [_pixels(point, top) for point in points], colour, mark.width * SCALE)


def _draw_line(draw: Any, points: Sequence[XY], colour: str, width: float) -> None:
    """Draw a line with round ends and corners, which Pillow lacks for broad lines."""
    draw.line(points, colour, round(width))
    if width > SCALE:
        for x, y in points:
            draw.ellipse([x - width / 2, y - width / 2, x + width / 2, y + width / 2], colour)


def _dashes(points: Sequence[XY]) -> list[list[XY]]:
    """Cut a line into dashes, whose rhythm continues around its corners."""
    dashes: list[list[XY]] = []
    along = 0.0  # the way since the last dash began
    for (x0, y0), (x1, y1) in pairwise(points):
        total, done = dist((x0, y0), (x1, y1)), 0.0
        while done < total:
            rest = (DASH if along < DASH else DASH + GAP) - along
            step = min(rest, total - done)
            if along < DASH:
                ends = [(x0 + (x1 - x0) * way / total, y0 + (y1 - y0) * way / total) for way in (done, done + step)]
                dashes = [*dashes[:-1], [*dashes[-1], ends[1]]] if along and dashes else [*dashes, ends]
            done, along = done + step, (along + step if step < rest or along < DASH else 0.0)
    return dashes


def _pixels(point: XY, top: float) -> XY:
    return point[0] * SCALE, (point[1] + top) * SCALE
