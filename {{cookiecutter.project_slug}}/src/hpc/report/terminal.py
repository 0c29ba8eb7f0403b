"""The report of a run as lines of a terminal."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from hpc.charts.axis import format_number
from hpc.charts.chart import Chart, drawable_values, nonfinite_note
from hpc.report.blocks import Block, BulletList, Collapsed, Facts, Figures, Preformatted, Section, Table
from hpc.report.run_table import TERMINAL_WIDTH, one_line

WIDTH = TERMINAL_WIDTH - 2  # blocks are indented
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40  # characters


def render_lines(sections: Sequence[Section]) -> Iterator[str]:
    """Yield lines of at most 120 columns."""
    for index, section in enumerate(sections):
        lines = [line for block in section.blocks for line in _block_lines(block)]
        if lines:
            yield from [*([""] if index else []), one_line(section.title), *(f"  {line}" for line in lines)]


def _block_lines(block: Block) -> list[str]:
    if isinstance(block, str):
        return wrap(one_line(block), WIDTH)
    if isinstance(block, Facts):
        width = max((len(name) for name, _ in block.items), default=0)
        return [f"{one_line(name):{width}}  {one_line(text)}" for name, text in block.items]
    if isinstance(block, BulletList):
        wrapped = (wrap(f"- {one_line(text)}", WIDTH, subsequent_indent="  ") for text in block.sentences)
        return [line for lines in wrapped for line in lines]
    if isinstance(block, Table):
        return _table_lines(block)
    if isinstance(block, Preformatted):
        return ["".join(char if char.isprintable() else " " for char in line) for line in block.text.splitlines()]
    if isinstance(block, Figures):
        return [line for chart in block.charts for line in _curve_lines(chart)]
    assert isinstance(block, Collapsed)
    return []


def _table_lines(table: Table) -> list[str]:
    """Return the rows in columns; if these are too wide, each row as text with the names of its cells."""
    rows = [[one_line(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if max(map(len, lines)) <= WIDTH:
        return lines
    return [line for row in rows[1:] for line in _row_as_text(rows[0], row)]


def _row_as_text(head: Sequence[str], row: Sequence[str]) -> list[str]:
    cells = [f"{name}: {cell}" if name else cell for name, cell in zip(head, row, strict=True) if cell]
    return wrap("; ".join(cells), WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _curve_lines(chart: Chart) -> Iterator[str]:
    """Yield a line for each series: its name, its course as bars, its first and its last value."""
    for series in chart.series:
        values, note = drawable_values(series, chart), nonfinite_note(series, chart)
        if values or note:
            name = one_line(f"{chart.title}: {series.name}" if series.name != chart.title else chart.title)
            ends = f"{format_number(values[0])} → {format_number(values[-1])}" if values else ""
            bars = _bars(values, chart.from_zero)
            yield f"{name:34}  {bars:{CURVE_WIDTH}}  {ends} {one_line(chart.y_label)}".rstrip()
            if note:
                yield f"  {note}"


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
