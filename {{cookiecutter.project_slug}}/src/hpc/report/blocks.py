"""What a story of a run is made of. A page and a terminal each show it in their own way."""

from dataclasses import dataclass, field

from hpc.charts.chart import Chart


@dataclass(frozen=True)
class Facts:
    """Few words each, with their names."""

    items: list[tuple[str, str]]


@dataclass(frozen=True)
class Items:
    """Sentences; what stands between ` is typed."""

    lines: list[str]


@dataclass(frozen=True)
class Table:
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Plain:
    """Lines that are laid out already."""

    text: str


@dataclass(frozen=True)
class Figures:
    """`wide`: over all of the page."""

    charts: list[Chart]
    wide: bool = False


@dataclass(frozen=True)
class Fold:
    """Long text, shown when it is asked for; in a terminal not at all."""

    name: str
    text: str


Block = str | Facts | Items | Table | Plain | Figures | Fold


@dataclass(frozen=True)
class Section:
    title: str
    blocks: list[Block] = field(default_factory=list)
