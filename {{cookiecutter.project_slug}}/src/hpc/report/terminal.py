"""A run's story as lines of a terminal."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from hpc.charts.axis import drawable, number
from hpc.charts.chart import Chart, broken
from hpc.report.blocks import Block, Facts, Figures, Fold, Items, Plain, Section, Table
from hpc.report.run_table import WIDTH, clean

BLOCKS = "▁▂▃▄▅▆▇█"
ACROSS = 40  # characters of a curve


def lines(sections: Sequence[Section]) -> Iterator[str]:
    """At most 120 columns wide."""
    for index, section in enumerate(sections):
        told = [line for block in section.blocks for line in _block(block)]
        if told:
            yield from [*([""] if index else []), clean(section.title), *(f"  {line}" for line in told)]


def _block(block: Block) -> list[str]:
    if isinstance(block, str):
        return wrap(clean(block), WIDTH - 2)
    if isinstance(block, Facts):
        across = max((len(name) for name, _ in block.items), default=0)
        return [f"{clean(name):{across}}  {clean(text)}" for name, text in block.items]
    if isinstance(block, Items):
        return [line for item in block.lines for line in wrap(f"- {clean(item)}", WIDTH - 2, subsequent_indent="  ")]
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Plain):
        return ["".join(char if char.isprintable() else " " for char in line) for line in block.text.splitlines()]
    if isinstance(block, Figures):
        return [line for chart in block.charts for line in _curves(chart)]
    assert isinstance(block, Fold)
    return []


def _table(table: Table) -> list[str]:
    """Rows below each other; where they are wider than the terminal, each one as text with the names of its cells."""
    rows = [[clean(cell) for cell in row] for row in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return text if max(map(len, text)) <= WIDTH - 2 else [line for row in rows[1:] for line in _told(rows[0], row)]


def _told(head: Sequence[str], row: Sequence[str]) -> list[str]:
    cells = [f"{name}: {cell}" if name else cell for name, cell in zip(head, row, strict=True) if cell]
    return wrap("; ".join(cells), WIDTH - 2, subsequent_indent="    ", break_on_hyphens=False)


def _curves(chart: Chart) -> Iterator[str]:
    for series in chart.series:
        values = [y for x, y in series.points if drawable(x, chart.log_x) and drawable(y, chart.log_y)]
        end = broken(series, chart)
        if values or end:
            name = clean(f"{chart.title}: {series.name}" if series.name != chart.title else chart.title)
            ends = f"{number(values[0])} → {number(values[-1])}" if values else ""
            line = f"{name:34}  {_bars(values, chart.from_zero):{ACROSS}}  {ends} {clean(chart.y)}".rstrip()
            yield line
            if end:
                yield f"  {end}"


def _bars(values: Sequence[float], from_zero: bool) -> str:
    """Means of stretches, from the lowest to the highest, or from 0 as the chart's axis."""
    count = min(ACROSS, len(values))
    parts = [values[len(values) * index // count : len(values) * (index + 1) // count] for index in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    low = min(low, 0.0) if from_zero else low
    return "".join(BLOCKS[int(7.99 * (mean - low) / (high - low)) if high > low else 0] for mean in means)
