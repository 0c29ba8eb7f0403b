"""What the nodes did while a run was on: monitor/ of its directory, as the samplers wrote it. Imports no torch."""

import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

from hpc.run.job_logs import text
from hpc.system.files import open_regular_file, parse_json

BYTES = 32 * 2**20  # of all nodes' samples that are read, some 3 s; of more, samples that lie evenly
GAP = 5  # so many intervals without a sample: nobody knows what was between
ASIDE = ("start", "validation", "checkpoint", "test")  # phases that are not training
LARGEST = 1e12  # of any cell


@dataclass(frozen=True)
class Phase:
    """A span of an attempt, in unix time of the first node."""

    what: str
    begin: float
    end: float
    attempt: int
    step: int = 0  # the last one done

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class Node:
    """A table of samples, by column; what is not known is not a number (nan)."""

    host: str
    columns: dict[str, array] = field(default_factory=dict)

    @property
    def times(self) -> Sequence[float]:
        return self.columns.get("time", array("d"))

    def gpus(self, metric: str) -> list[array]:
        """The columns of all of its GPUs, of percent, memory_gb, watts or celsius."""
        return [self.columns[name] for name in self.columns if re.fullmatch(rf"gpu\d+_{metric}", name)]

    def gpu_percent(self) -> list[float]:
        """The mean of its GPUs, by sample."""
        return [mean(values) for values in zip(*self.gpus("percent"), strict=True)]

    def energy(self) -> float:
        """Of its GPUs, in joules, by the trapezoidal rule; gaps count nothing."""
        times, attempts = self.times, self.columns.get("attempt", ())
        steps = [after - before for before, after in pairwise(times)]
        longest = GAP * median(steps) if steps else 0
        watts = [sum(value for value in values if value == value) for values in zip(*self.gpus("watts"), strict=True)]
        return sum(
            seconds * (watts[index] + watts[index + 1]) / 2
            for index, seconds in enumerate(steps if watts else [])
            if 0 < seconds <= longest and attempts[index] == attempts[index + 1]
        )


def nodes(run_dir: Path) -> tuple[list[Node], list[str]]:
    """The samples of each node, and what is wrong with them."""
    files = sorted((run_dir / "monitor").glob("*.csv"))
    every = max(math.ceil(sum(_size(file) for file in files) / BYTES), 1)
    found, notes = [], []
    if every > 1:
        notes.append(f"of the samples of the {len(files)} nodes one in {every} is read")
    for file in files:
        node, damaged = read(file, every)
        found.append(node)
        if not node.times:
            notes.append(f"{file.name} has no sample")
        elif damaged:
            notes.append(f"{file.name}: {damaged} damaged line{'s' if damaged > 1 else ''} left out")
    return found, notes


def read(file: Path, every: int = 1) -> tuple[Node, int]:
    """One node's table, of its lines one in `every`, and how many of these are damaged."""
    node, damaged = Node(file.stem), 0
    try:
        with TextIOWrapper(open_regular_file(file), encoding="utf-8", errors="replace") as stream:
            names = stream.readline().rstrip("\n").split(",")
            if names[:2] != ["time", "attempt"]:
                return node, 1
            node.columns = {name: array("d") for name in names}
            for line in islice(stream, 0, None, every):
                cells = _cells(line, len(names))
                damaged += cells is None
                for name, cell in zip(names, cells or (), strict=False):
                    node.columns[name].append(cell)
    except OSError:
        return node, 1
    return node, damaged


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def phases(run_dir: Path) -> list[Phase]:
    """What rank 0 has noted; a damaged line is left out, and so is a phase that ends before it begins."""
    return [phase for phase in _noted(run_dir) if phase]


def damaged_phases(run_dir: Path) -> int:
    """How many lines are left out."""
    return _noted(run_dir).count(None)


def _noted(run_dir: Path) -> list[Phase | None]:
    return [_phase(line) for line in text(run_dir / "monitor" / "phases.jsonl").splitlines() if line.strip()]


def _phase(line: str) -> Phase | None:
    try:
        note = parse_json(line)
        begin, end, step = float(note["begin"]), float(note["end"]), int(note.get("step") or 0)
        phase = Phase(str(note["what"]), begin, end, int(note["attempt"]), step)
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError):
        return None
    return phase if 0 <= phase.seconds < LARGEST else None


def training(node: Node, phases: Sequence[Phase]) -> list[int]:
    """Which of its samples were taken while the run trained, and did not start, validate, test or save."""
    aside = sorted((phase.begin, phase.end) for phase in phases if phase.what in ASIDE)
    begins, ends = [begin for begin, _ in aside], []
    for _, end in aside:
        ends.append(max(end, ends[-1] if ends else end))
    kept = []
    for index, when in enumerate(node.times):
        before = bisect_right(begins, when)
        if not before or when > ends[before - 1]:
            kept.append(index)
    return kept


def busy(node: Node) -> float:
    """How much it did: percent of its GPUs, or of its CPUs where it has none; infinite: not known."""
    percents = mean(node.gpu_percent() or node.columns.get("cpu_percent", ()))
    return percents if percents == percents else math.inf


def mean(values: Sequence[float]) -> float:
    """Of those that are known; nan: none is."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan


def _cells(line: str, count: int) -> list[float] | None:
    """The numbers of a line; None: it is damaged, or has no end yet."""
    words = line.rstrip("\n").split(",")
    if not line.endswith("\n") or len(words) != count:
        return None
    try:
        cells = [float(word) if word else math.nan for word in words]
    except ValueError:
        return None
    good = all(abs(cell) < LARGEST or cell != cell for cell in cells)
    return cells if good and cells[0] == cells[0] else None
