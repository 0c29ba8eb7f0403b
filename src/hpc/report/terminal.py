"""The sections of a report as lines for the terminal."""

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from hpc.charts.chart import Chart, drawable_values, nonfinite_note
from hpc.charts.units import format_si
from hpc.report.blocks import Block, Figures, Preformatted, Section, Table
from hpc.system.tables import make_table, one_line, render_lines

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40  # characters


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
