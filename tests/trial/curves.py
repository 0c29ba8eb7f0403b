"""Compare the curves and tables that two runs have logged."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path

TIMED = re.compile(r"^(perf/|node/|DeviceStatsMonitor)")  # curves of time and hardware
# Curves that are equal in every layout; others depend on the micro-batch of one rank.
OF_ALL_RANKS = re.compile(r"^(step/(loss|lr|grad_norm)|lr-.*|own/metric|val/.*|test/.*)$")
# Lightning logs `epoch` with every metric, and a learning rate without schedule at the start of an epoch and of its
# first batch. The drawn module may log in every micro-batch, and a run may validate after each. What only one of two
# runs has twice is found by comparing their steps.
REPEATED = re.compile(r"^(epoch$|own/|val/|lr-)")

Points = dict[str, list[tuple[int, float]]]


def near(values: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    """Return whether values are equal, NaN to itself, or within the tolerance."""
    return len(values) == len(others) and all(
        repr(a) == repr(b) or abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in zip(values, others, strict=True)
    )


def curves(run_dir: Path, *, purge: bool = True) -> Points:
    """Return every scalar except those of time and hardware, as TensorBoard shows them or, not purged, as written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard"), {"scalars": 0}, purge_orphaned_data=purge)
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not TIMED.search(tag)]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def curves_differ(reference: Path, run_dir: Path, tolerance: float, moved: bool) -> list[str]:
    """Return one line per curve or table that differs."""
    if moved:  # other curves have one point per micro-batch
        wanted, found = (
            {tag: sorted(dict(points).items()) for tag, points in curves(path).items() if OF_ALL_RANKS.match(tag)}
            for path in (reference, run_dir)
        )
        return _points_differ(wanted, found, max(tolerance, 1e-6))  # curves are in fp32
    lines: list[str] = []
    for purge in (True, False):  # what TensorBoard would hide of an earlier attempt was written, too
        wanted, found = (curves(path, purge=purge) for path in (reference, run_dir))
        lines += _points_differ(wanted, found, 0.0)
    twice = [tag for tag, points in found.items() if not REPEATED.match(tag) and len(dict(points)) != len(points)]
    lines += [f"curve {tag}: several points of one step" for tag in twice]
    return list(dict.fromkeys(lines)) + _tables_differ(reference, run_dir)


def _points_differ(wanted: Points, found: Points, tolerance: float) -> list[str]:
    lines = []
    for tag in sorted(wanted | found):
        here, there = found.get(tag, []), wanted.get(tag, [])
        if [step for step, _ in here] != [step for step, _ in there]:
            lines.append(f"curve {tag}: steps {[step for step, _ in here]} instead of {[step for step, _ in there]}")
            continue
        for (step, value), (_, other) in zip(here, there, strict=True):
            if not near([value], [other], tolerance):
                lines.append(f"curve {tag} at step {step}: {value} instead of {other}")
                break
    return lines


def _tables_differ(reference: Path, run_dir: Path) -> list[str]:
    """Compare CSVLogger's values by step, independent of the order of columns and the number of rows per step."""
    odd = _rows(reference) ^ _rows(run_dir)
    return [f"metrics.csv: {min(odd)} is in one table only"] if odd else []


def _rows(run_dir: Path) -> set[str]:
    rows = [row for file in sorted(run_dir.rglob("metrics.csv")) for row in csv.DictReader(file.open())]
    return {
        f"step {row['step']} {key} {value}"
        for row in rows
        for key, value in row.items()
        if value and not TIMED.search(key)
    }
