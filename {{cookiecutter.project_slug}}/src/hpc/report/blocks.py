"""The parts of a report. page.py shows them as HTML, terminal.py as text."""

from dataclasses import dataclass, field

from hpc.charts.chart import Chart


@dataclass(frozen=True)
class Facts:
    """Short texts with their names: (name, text)."""

    items: list[tuple[str, str]]


@dataclass(frozen=True)
class BulletList:
    """Sentences. Text between backticks is something to type."""

    sentences: list[str]


@dataclass(frozen=True)
class Table:
    """Rows of cells below a head."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Preformatted:
    """Lines whose spaces matter."""

    text: str


@dataclass(frozen=True)
class Figures:
    """Charts beside each other; with `wide`, each over the width of the page."""

    charts: list[Chart]
    wide: bool = False


@dataclass(frozen=True)
class Collapsed:
    """A long text that a page shows after a click, and a terminal not at all."""

    name: str
    text: str


Block = str | Facts | BulletList | Table | Preformatted | Figures | Collapsed


@dataclass(frozen=True)
class Section:
    """A part of a report under a title."""

    title: str
    blocks: list[Block] = field(default_factory=list)
