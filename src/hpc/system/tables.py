"""Tables and lines for the terminal, by rich. In a pipe or a file they have no colours and are never wrapped."""

import io
import re
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 100_000  # columns; no table is as wide
MAX_CELL_LENGTH = 400  # characters
NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]\d+)?|nan|-?inf")


def make_console() -> Console:
    """Return a console for stdout. Only a terminal has a width and colours."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def one_line(value: object) -> str:
    """Return a value as one line of text, without characters that control a terminal."""
    text = " ".join("".join(char if char.isprintable() else " " for char in str(value)).split())
    return text if len(text) <= MAX_CELL_LENGTH else f"{text[:MAX_CELL_LENGTH]} ..."


def make_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts, in which nothing is taken for markup.

    The first column names the rows. Other columns of numbers are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(head))
    for index, (title, *cells) in enumerate(zip(head, *rows, strict=True)):
        values = [cell for cell in cells if cell not in ("", "-")]
        is_numeric = index > 0 and bool(values) and all(map(NUMBER.fullmatch, values))
        table.add_column(Text(title), justify="right" if is_numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))
    return table


def render_lines(parts: Sequence[RenderableType], console: Console, *, indent: int = 0) -> list[str]:
    """Return what a console would print, without spaces at the end of a line."""
    with console.capture() as capture:
        for part in parts:
            console.print(part, width=console.width - indent)
    return [" " * indent + line.rstrip() for line in capture.get().splitlines()]


def table_lines(head: Sequence[str], rows: Sequence[Sequence[str]], *, console: Console | None = None) -> list[str]:
    """Return a table as lines.

    Args:
        console: a terminal folds long cells to its width; None: plain lines, as for a file.
    """
    plain = Console(file=io.StringIO(), width=PIPE_WIDTH, color_system=None, force_terminal=False)
    return render_lines([make_table(head, rows)], console or plain)
