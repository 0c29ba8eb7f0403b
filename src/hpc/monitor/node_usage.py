"""Samples of the nodes and phases of a run, as they are read: files in monitor/ of its directory. Imports no torch."""

import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

from hpc.run.job_logs import read_tail
from hpc.system.files import open_regular_file, parse_json

MAX_BYTES = 32 * 2**20  # of phases, and of samples that are read, in about 3 s; of more samples, one in so many is read
GAP_INTERVALS = 5  # after so many intervals without a sample, the time between counts as unknown
NOT_TRAINING = ("start", "validation", "checkpoint", "test")  # phases
MAX_VALUE = 1e12  # the largest value that a sample or a phase may have
MAX_LINE_BYTES = 2**16
# Of a sample. Others are left out, so that the table has few columns whatever a file holds.
COLUMN = re.compile(
    r"time|attempt|cpu_percent|memory_gb|net_(in|out)_mbs|disk_(read|write)_mbs"
    r"|gpu1?\d_(percent|memory_gb|watts|celsius)"
)


def samples_file(run_dir: Path, host: str) -> Path:
    """Return the file with the samples of a node: a line of JSON for each, by column; null: unknown."""
    return run_dir / "monitor" / f"node-{host}.jsonl"


def first_sample_time(file: Path) -> float | None:
    """Return the unix time of the first sample in a file; None if there is none."""
    try:
        with open_regular_file(file) as stream:
            sample = _parse_sample(stream.readline(MAX_LINE_BYTES))
    except OSError:
        return None
    return sample["time"] if sample else None


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

    def add(self, sample: Mapping[str, float]) -> None:
        """Add a sample by column, if there is one: an attempt may have other columns (GPUs) than the one before."""
        for name in [name for name in sample if name not in self.columns]:
            self.columns[name] = array("d", [math.nan] * len(self.times))
        for name, column in self.columns.items() if sample else ():
            column.append(sample.get(name, math.nan))

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
    files = sorted((run_dir / "monitor").glob("node-*.jsonl"))
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
    node, damaged = NodeSamples(file.stem.removeprefix("node-")), 0
    try:
        with open_regular_file(file) as stream:
            for line in islice(stream, 0, None, stride):
                sample = _parse_sample(line)
                damaged += sample is None
                node.add(sample or {})
    except OSError:
        return node, 1
    return node, damaged


def _parse_sample(line: bytes) -> dict[str, float] | None:
    """Return the values of a line by column; None if it is damaged or incomplete."""
    try:
        sample = parse_json(line)
        cells = {name: sample[name] for name in sample if COLUMN.fullmatch(name)}
        known = {name: float(value) for name, value in cells.items() if value is not None}
    except (ValueError, TypeError, OverflowError):
        return None
    is_whole = {"time", "attempt"} <= known.keys() and all(abs(value) < MAX_VALUE for value in known.values())
    return {name: known.get(name, math.nan) for name in cells} if is_whole else None


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
    return phase if 0 <= phase.seconds < MAX_VALUE else None


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
