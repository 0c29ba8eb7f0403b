"""What stands below the table of a scaling study: what its columns are, what its metrics say of each other, and why."""

import shlex
import textwrap
from collections.abc import Sequence

from hpc.studies.scaling_points import Point, Study
from hpc.studies.scaling_table import Row

WIDTH = 100  # in the terminal


def below(study: Study, points: Sequence[Point], found: Sequence[Row]) -> list[str]:
    """Below the table: what its columns are and, of metrics of several points, why they differ."""
    valued = {row.nodes for row in found if row.value is not None}
    made = [point for point in points if point.nodes in valued]
    return [*legend(study, found), *([compared(study, made), why(study, made)] if made[1:] else [])]


def legend(study: Study, found: Sequence[Row]) -> list[str]:
    """What the columns are, and what they cannot tell apart."""
    first, windows = found[0], min(row.windows for row in found)
    smaller = "; in strong scaling also what smaller batches per device cost" if study.scaling == "strong" else ""
    return [
        f"step, compute, data, other: ms, in the window whose step time is the median of {windows} (perf/ in the run's "
        "curves); the first window is warm-up and left out.",
        f"eff. %: {first.unit} per second and device, against nodes={first.nodes}.",
        f"excess: compute beyond that of nodes={first.nodes} for as many samples per device, which is communication "
        f"between nodes and waiting for the slowest rank{smaller}.",
        "planned: by plan.py; GPU %: mean of the samples in monitor/ while the run trained; -: not known.",
    ]


def compared(study: Study, made: Sequence[Point]) -> str:
    """What the final metrics of the points say of each other."""
    if study.scaling == "strong":
        return (
            "Metrics are after the same updates from the same samples: they differ by rounding, and by batch norm if "
            "there is some, as it looks across the samples of one device."
        )
    own = [f"nodes={made[0].nodes}", f"steps={study.steps * made[-1].nodes // made[0].nodes}"]
    return (
        f"Metrics are after equal steps, in which nodes={made[-1].nodes} has seen {made[-1].batch / made[0].batch:g} "
        f"times the samples of nodes={made[0].nodes}. A rule for the rate promises equal metrics after equal samples; "
        f"for those:\n{shlex.join(['python', 'tools/scale.py', *own, *study.words])}"
    )


def why(study: Study, made: Sequence[Point]) -> str:
    """Where the accuracy comes from that falls in the usual tables of 1 GPU, 4 GPUs, 2 nodes; and what is done here."""
    first, last = made[0], made[-1]
    if study.scaling == "strong":
        here = f"the batch stays {first.batch}, so that all points make the same {study.steps} updates"
    elif last.rule == "keep":
        here = f"it grows too, from {first.batch} to {last.batch}, and the rate stays, as lr=keep asks"
    else:
        warmup = "" if last.warmup is None else f", after {last.warmup} steps of warm-up"
        rates = f"the rate with it from {first.lr:.4g} to {last.lr:.4g} (lr={last.rule})"
        here = f"it grows from {first.batch} to {last.batch}, and {rates}{warmup}"
    return (
        "Where accuracy falls from 1 GPU to 4 GPUs to 2 nodes, the global batch grew with them unnoticed: fewer "
        f"updates per epoch, at the same learning rate; here {here}."
    )


def wrapped(notes: Sequence[str]) -> list[str]:
    """For the terminal. What stands below a note is a command line, which stays whole."""
    lines = []
    for note in notes:
        text, *commands = note.split("\n")
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines += (f"  {command}" for command in commands)
    return lines
