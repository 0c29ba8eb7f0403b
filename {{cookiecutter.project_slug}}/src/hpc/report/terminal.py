"""Reports as lines of a terminal, by rich. Into a pipe or a file, they have no colours and are never wrapped."""

from collections.abc import Iterator, Sequence
from typing import IO

from rich.console import Console, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from hpc.charts.chart import Chart, drawable_values, nonfinite_note
from hpc.charts.units import format_si
from hpc.report.blocks import Block, Figures, Preformatted, Section, Table

PIPE_WIDTH = 100_000  # columns; nothing is as wide
MAX_CELL_LENGTH = 400  # characters
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40  # characters


def make_console(file: IO[str] | None = None) -> Console:
    """Return a console for stdout or a file. Only a terminal has a width and colours."""
    console = Console(file=file, highlight=False)
    return console if console.is_terminal else Console(file=file, highlight=False, width=PIPE_WIDTH)


def one_line(value: object) -> str:
    """Return a value as one line of text, without characters that control a terminal."""
    text = " ".join("".join(char if char.isprintable() else " " for char in str(value)).split())
    return text if len(text) <= MAX_CELL_LENGTH else f"{text[:MAX_CELL_LENGTH]} ..."


def render_lines(parts: Sequence[RenderableType], console: Console, *, indent: int = 0) -> list[str]:
    """Return what a console would print, without spaces at the end of a line."""
    with console.capture() as capture:
        for part in parts:
            console.print(part, width=console.width - indent)
    return [" " * indent + line.rstrip() for line in capture.get().splitlines()]


def make_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Grid:
    """Return a table of texts, in which nothing is taken for markup.

    Args:
        right: titles of the columns that are aligned to the right.
    """
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(head))
    for title in head:
        grid.add_column(Text(title), justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(one_line(cell)) for cell in row))
    return grid


def section_lines(sections: Sequence[Section], console: Console) -> Iterator[str]:
    """Yield the sections, whose blocks are indented."""
    for index, section in enumerate(sections):
        blocks = [part for block in section.blocks for part in _block_parts(block)]
        if blocks:
            title = render_lines([Text(one_line(section.title), style="bold")], console)
            yield from [*([""] if index else []), *title, *render_lines(blocks, console, indent=2)]


def _block_parts(block: Block) -> list[RenderableType]:
    if isinstance(block, str):
        return [Text(one_line(block))]
    if isinstance(block, list):
        return [Text(one_line(f"- {sentence}")) for sentence in block]
    if isinstance(block, dict):
        return [make_table(["", ""], list(block.items()))]
    if isinstance(block, Table):
        return [make_table(block.head, block.rows)]
    if isinstance(block, Figures):
        rows = [row for chart in block.charts for row in _curve_rows(chart)]
        return [make_table(["", "", ""], rows)] if rows else []
    assert isinstance(block, Preformatted)
    lines = ["".join(char if char.isprintable() else " " for char in line) for line in block.text.splitlines()]
    return [] if block.name else [Text("\n".join(lines))]


def _curve_rows(chart: Chart) -> Iterator[list[str]]:
    """Yield a row for each series: its name, its course as bars, its first and its last value."""
    for series in chart.series:
        values, note = drawable_values(series, chart), nonfinite_note(series, chart)
        if values or note:
            name = f"{chart.title}: {series.name}" if series.name != chart.title else chart.title
            ends = f"{format_si(values[0])} → {format_si(values[-1])} {chart.y_label}" if values else ""
            yield [name, _bars(values, chart.from_zero), "; ".join(filter(None, [ends.strip(), note]))]


def _bars(values: Sequence[float], from_zero: bool) -> str:
    """Return the means of stretches as bars, from the lowest mean to the highest, or from 0 like the chart's axis."""
    num_bars = min(CURVE_WIDTH, len(values))
    stretches = [
        values[len(values) * index // num_bars : len(values) * (index + 1) // num_bars] for index in range(num_bars)
    ]
    means = [sum(stretch) / len(stretch) for stretch in stretches]
    low, high = min(means, default=0.0), max(means, default=0.0)
    low = min(low, 0.0) if from_zero else low
    return "".join(BARS[int(7.99 * (mean - low) / (high - low)) if high > low else 0] for mean in means)
