"""Lines, boxes and words, drawn as SVG or as PNG. Pillow is imported for the PNG only."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import dist
from pathlib import Path
from typing import Any

Point = tuple[float, float]  # pixels from the upper left corner

# Okabe and Ito's colours, which the colour-blind tell apart. A page sets others as CSS variables of these names.
COLOURS = {
    "text": "#1b1b1b", "muted": "#595959", "line": "#dcdcdc", "series-1": "#0072b2", "series-2": "#d55e00",
    "series-3": "#009e73", "series-4": "#cc79a7", "series-5": "#e69f00", "series-6": "#56b4e9",
}  # fmt: skip
SIZE = 12  # pixels of text
SCALE = 4  # pixels drawn for one of the SVG; the PNG keeps half of them, which smooths its lines
DASH, GAP = 6, 4
OPACITY = 0.35  # of boxes


@dataclass(frozen=True)
class Line:
    """Two equal points: a dot."""

    points: Sequence[Point]
    colour: str
    width: float = 1.0
    dashed: bool = False


@dataclass(frozen=True)
class Box:
    """What lies behind it shines through."""

    corner: Point
    size: Point
    colour: str


@dataclass(frozen=True)
class Text:
    at: Point  # on its base line
    text: str
    colour: str = "muted"
    anchor: str = "start"  # or middle, end
    bold: bool = False


Mark = Line | Box | Text


def length(text: str) -> float:
    """Pixels, on the safe side of common fonts."""
    return 0.58 * SIZE * len(text)


def svg(marks: Sequence[Mark], width: int, height: int, label: str) -> str:
    """An element for a page; `label` is what is read aloud."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    style = f'font-family="system-ui, sans-serif" font-size="{SIZE}" stroke-linecap="round" stroke-linejoin="round"'
    return f'{head} {style} aria-label="{_escaped(label)}">{"".join(map(_element, marks))}</svg>'


def png(pictures: Sequence[Sequence[Mark]], width: int, height: int, path: Path) -> None:
    """Below each other, on white, in twice the pixels of the SVG."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width * SCALE, height * SCALE * len(pictures)), "white")
    draw, font = ImageDraw.Draw(image, "RGBA"), ImageFont.load_default(SIZE * SCALE)
    for index, marks in enumerate(pictures):
        for mark in marks:
            _draw(draw, font, mark, index * height)
    image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS).save(path)


def _element(mark: Mark) -> str:
    colour = f"var(--{mark.colour},{COLOURS[mark.colour]})"
    if isinstance(mark, Text):
        bold = ' font-weight="600"' if mark.bold else ""
        at = f'x="{mark.at[0]:.1f}" y="{mark.at[1]:.1f}" text-anchor="{mark.anchor}"'
        return f'<text {at}{bold} style="fill:{colour}">{_escaped(mark.text)}</text>'
    if isinstance(mark, Box):
        (x, y), (width, height) = mark.corner, mark.size
        box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        return f'<rect {box} style="fill:{colour};fill-opacity:{OPACITY}"/>'
    dashes = f";stroke-dasharray:{DASH} {GAP}" if mark.dashed else ""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
    return f'<polyline points="{points}" style="fill:none;stroke:{colour};stroke-width:{mark.width:g}{dashes}"/>'


def _escaped(text: str) -> str:
    return escape("".join(char if char.isprintable() else " " for char in text))


def _draw(draw: Any, font: Any, mark: Mark, down: float) -> None:
    colour = COLOURS[mark.colour]
    if isinstance(mark, Text):
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[mark.anchor]
        bold = SCALE / 5 if mark.bold else 0
        draw.text(_pixels(mark.at, down), mark.text, colour, font, anchor, stroke_width=bold)
    elif isinstance(mark, Box):
        end = (mark.corner[0] + mark.size[0], mark.corner[1] + mark.size[1])
        draw.rectangle([_pixels(mark.corner, down), _pixels(end, down)], f"{colour}{round(255 * OPACITY):02x}")
    else:
        for part in _dashes(mark.points) if mark.dashed else [mark.points]:
            _stroke(draw, [_pixels(point, down) for point in part], colour, mark.width * SCALE)


def _stroke(draw: Any, points: Sequence[Point], colour: str, width: float) -> None:
    """With round ends and corners, of which Pillow has none for a broad line."""
    draw.line(points, colour, round(width))
    if width > SCALE:
        for x, y in points:
            draw.ellipse([x - width / 2, y - width / 2, x + width / 2, y + width / 2], colour)


def _dashes(points: Sequence[Point]) -> list[list[Point]]:
    """A line cut into pieces, the rhythm going on around its corners."""
    dashes: list[list[Point]] = []
    along = 0.0  # since the last dash began
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


def _pixels(point: Point, down: float) -> Point:
    return point[0] * SCALE, (point[1] + down) * SCALE
