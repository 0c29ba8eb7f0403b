"""Tables for the terminal, drawn by rich."""

import io
import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_WIDTH = 10_000  # characters; a table is never wrapped or cut to the width of the terminal


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table as lines without colour. Columns of numbers are aligned to the right.

    Args:
        rows: the cells; `[b]` in a cell is text, not markup.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, *cells in zip(head, *rows, strict=True):
        is_numeric = all(re.fullmatch(r"-|[-+]?[\d.]+(e[-+]\d+)?|nan|-?inf", cell) for cell in cells)
        table.add_column(Text(title), justify="right" if is_numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=MAX_WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]
