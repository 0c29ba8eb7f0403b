"""Samples of the nodes, written and read, and phases of a run: files in monitor/ of its directory. Imports no torch."""

import math
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import islice, pairwise
from pathlib import Path

from hpc.run.job_logs import read_tail
from hpc.system.files import append_whole, open_regular_file, parse_json

MAX_BYTES = 32 * 2**20  # of phases, and of samples that are read, in about 3 s; of more samples, one in so many is read
GAP_INTERVALS = 5  # after so many intervals without a sample, the time between counts as unknown
NOT_TRAINING = ("start", "validation", "checkpoint", "test")  # phases
MAX_CELL_VALUE = 1e12  # the largest value that a cell may have


Sample = Mapping[str, float | int | None]  # by column; None: unknown


class SampleTable:
    """A CSV file with a header, to which each attempt at a run appends."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path, self.columns = path, list(columns)
        self._file: int | None = None

    def add(self, sample: Sample) -> None:
        """Append a row, with empty cells for unknown values. Raises `OSError`."""
        if self._file is None:
            self._file = self._open()
        cells = ("" if (value := sample.get(column)) is None else f"{round(value, 3)}" for column in self.columns)
        append_whole(self._file, (",".join(cells) + "\n").encode())

    def first_time(self) -> float | None:
        """Return the first cell of the first row; None if there is no row."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as stream:
                return float((stream.readline() and stream.readline()).partition(",")[0])
        except (OSError, ValueError):
            return None

    def _open(self) -> int:
        """Open the file, and extend its header if this attempt has columns (other GPUs) that are new."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]  # a crash may have cut a number of the last line in half
        lines = complete.decode(errors="replace").splitlines()
        columns = lines[0].split(",") if lines else []
        new_columns = [column for column in self.columns if column not in columns]
        self.columns = [*columns, *new_columns]
        if new_columns:
            padded = [",".join(self.columns), *(line + "," * len(new_columns) for line in lines[1:])]
            temporary = self.path.with_suffix(".part")
            temporary.write_text("\n".join(padded) + "\n", encoding="utf-8")
            temporary.replace(self.path)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not new_columns and len(complete) < len(content):
            os.ftruncate(file, len(complete))
        return file


@dataclass(frozen=True)
class Phase:
    """A part of an attempt, in unix time of the first node."""

    name: str  # start, epoch, validation, checkpoint, test
    begin: float
    end: float
    attempt: int
    step: int = 0  # the last step that was done

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass
class NodeSamples:
    """The samples of a node, by column; unknown values are NaN."""

    host: str
    columns: dict[str, array] = field(default_factory=dict)

    @property
    def times(self) -> Sequence[float]:
        return self.columns.get("time", array("d"))

    def gpu_columns(self, metric: str) -> list[array]:
        """Return a column for each of its GPUs. `metric` is percent, memory_gb, watts or celsius."""
        return [self.columns[name] for name in self.columns if re.fullmatch(rf"gpu\d+_{metric}", name)]

    def gpu_percent(self) -> list[float]:
        """Return the mean use of its GPUs, by sample."""
        return [known_mean(values) for values in zip(*self.gpu_columns("percent"), strict=True)]

    def num_gpus_with_power(self) -> int:
        """Return how many of its GPUs report their power."""
        return sum(any(value == value for value in column) for column in self.gpu_columns("watts"))

    def energy_joules(self) -> float | None:
        """Return the energy of the GPUs that report their power, by the trapezoidal rule; None if it is unknown.

        Gaps between samples count as 0.
        """
        from statistics import median  # not above: a sampler needs none of the twenty modules that it imports

        times, attempts = self.times, self.columns.get("attempt", ())
        intervals = [after - before for before, after in pairwise(times)]
        longest = GAP_INTERVALS * median(intervals) if intervals else 0
        joules = [
            seconds * (watts[index] + watts[index + 1]) / 2
            for watts in self.gpu_columns("watts")
            for index, seconds in enumerate(intervals)
            if 0 < seconds <= longest and attempts[index] == attempts[index + 1]
        ]
        known = [value for value in joules if value == value]
        return sum(known) if known else None


def read_nodes(run_dir: Path) -> tuple[list[NodeSamples], list[str]]:
    """Return the samples of each node, and notes on those that are damaged or left out."""
    files = sorted((run_dir / "monitor").glob("*.csv"))
    stride = max(math.ceil(sum(_size(file) for file in files) / MAX_BYTES), 1)
    nodes, notes = [], []
    if stride > 1:
        notes.append(f"only one in {stride} of the samples of the {len(files)} nodes is read")
    for file in files:
        node, damaged = read_node(file, stride)
        nodes.append(node)
        if not node.times:
            notes.append(f"{file.name} has no sample")
        elif damaged:
            notes.append(f"{file.name}: {damaged} damaged line(s) left out")
    return nodes, notes


def read_node(file: Path, stride: int = 1) -> tuple[NodeSamples, int]:
    """Return every `stride`-th sample of a node, and how many of these lines are damaged."""
    node, damaged = NodeSamples(file.stem), 0
    try:
        with TextIOWrapper(open_regular_file(file), encoding="utf-8", errors="replace") as stream:
            names = stream.readline().rstrip("\n").split(",")
            if names[:2] != ["time", "attempt"]:
                return node, 1
            node.columns = {name: array("d") for name in names}
            for line in islice(stream, 0, None, stride):
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


def read_phases(run_dir: Path) -> list[Phase]:
    """Return the phases that rank 0 noted, without damaged lines and without phases that end before they begin."""
    return [phase for phase in _phase_lines(run_dir) if phase]


def count_damaged_phases(run_dir: Path) -> int:
    """Return how many lines `read_phases` leaves out."""
    return _phase_lines(run_dir).count(None)


def _phase_lines(run_dir: Path) -> list[Phase | None]:
    text = read_tail(run_dir / "monitor" / "phases.jsonl", max_bytes=MAX_BYTES)
    return [_phase(line) for line in text.splitlines() if line.strip()]


def _phase(line: str) -> Phase | None:
    try:
        note = parse_json(line)
        begin, end, step = float(note["begin"]), float(note["end"]), int(note.get("step") or 0)
        phase = Phase(str(note["what"]), begin, end, int(note["attempt"]), step)
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError):
        return None
    return phase if 0 <= phase.seconds < MAX_CELL_VALUE else None


def indices_while_training(node: NodeSamples, phases: Sequence[Phase]) -> list[int]:
    """Return the indices of samples that were taken while the run trained, not in one of NOT_TRAINING."""
    excluded = sorted((phase.begin, phase.end) for phase in phases if phase.name in NOT_TRAINING)
    begins, ends = [begin for begin, _ in excluded], []
    for _, end in excluded:  # phases may overlap
        ends.append(max(end, ends[-1] if ends else end))
    indices = []
    for index, time in enumerate(node.times):
        num_begun = bisect_right(begins, time)
        if not num_begun or time > ends[num_begun - 1]:
            indices.append(index)
    return indices


def mean_device_percent(node: NodeSamples) -> float:
    """Return the mean use of its GPUs, or of its CPUs if it has no GPU; infinite if it is unknown."""
    percent = known_mean(node.gpu_percent() or node.columns.get("cpu_percent", ()))
    return percent if percent == percent else math.inf


def known_mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are known (not NaN); NaN if there are none."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan


def _cells(line: str, count: int) -> list[float] | None:
    """Return the numbers of a line; None if it is damaged or incomplete."""
    words = line.rstrip("\n").split(",")
    if not line.endswith("\n") or len(words) != count:
        return None
    try:
        cells = [float(word) if word else math.nan for word in words]
    except ValueError:
        return None
    in_range = all(abs(cell) < MAX_CELL_VALUE or cell != cell for cell in cells)
    return cells if in_range and cells[0] == cells[0] else None
