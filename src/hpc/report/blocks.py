"""The parts of a report. page.py shows them as HTML, terminal.py as text."""

from dataclasses import dataclass, field

from hpc.charts.chart import Chart


@dataclass(frozen=True)
class Table:
    """Rows of cells below a head."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Preformatted:
    """Lines whose spaces matter. With a name, a page shows them after a click, and a terminal not at all."""

    text: str
    name: str = ""


@dataclass(frozen=True)
class Figures:
    """Charts beside each other; with `wide`, each as wide as the page."""

    charts: list[Chart]
    wide: bool = False


# A paragraph, the items of a list, or facts by name. Text between backticks is something to type.
Block = str | list[str] | dict[str, str] | Table | Preformatted | Figures


@dataclass(frozen=True)
class Section:
    """A part of a report under a title."""

    title: str
    blocks: list[Block] = field(default_factory=list)
