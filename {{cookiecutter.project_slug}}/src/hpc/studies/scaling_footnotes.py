"""The notes below the table of a scaling study: its columns, and why the metrics of its points differ or agree."""

import shlex
import textwrap
from collections.abc import Sequence

from hpc.studies.scaling_points import ScalingPoint, ScalingStudy
from hpc.studies.scaling_table import ScalingRow

WIDTH = 100  # characters, in the terminal


def footnotes(study: ScalingStudy, points: Sequence[ScalingPoint], rows: Sequence[ScalingRow]) -> list[str]:
    """Return the notes below the table: the columns and, if several points have a metric, why the metrics differ."""
    nodes_with_metric = {row.nodes for row in rows if row.value is not None}
    points = [point for point in points if point.num_nodes in nodes_with_metric]
    metric_notes = [compare_metrics(study, points), explain_accuracy(study, points)] if len(points) > 1 else []
    return [*explain_columns(study, rows), *metric_notes]


def explain_columns(study: ScalingStudy, rows: Sequence[ScalingRow]) -> list[str]:
    """Return what each column means, and what it includes."""
    first, num_windows = rows[0], min(row.windows for row in rows)
    is_strong = study.scaling == "strong"
    batch_effect = "; in strong scaling also the cost of smaller batches per device" if is_strong else ""
    return [
        f"step, compute, data, other: ms, in the window whose step time is the median of {num_windows} (perf/ in the "
        "run's curves). The first window is warm-up and left out.",
        f"eff. %: {first.unit} per second and device, relative to nodes={first.nodes}.",
        f"excess: compute time beyond that of nodes={first.nodes} for as many samples per device, which is "
        f"communication between nodes and waiting for the slowest rank{batch_effect}.",
        "planned: predicted by plan.py. GPU %: mean of the samples in monitor/ while the run trained. -: unknown.",
    ]


def compare_metrics(study: ScalingStudy, points: Sequence[ScalingPoint]) -> str:
    """Return what may be concluded from the final metrics of these points."""
    first, last = points[0], points[-1]
    if study.scaling == "strong":
        return (
            "Metrics are after the same updates from the same samples. They differ by rounding, and by batch norm if "
            "there is any, as its statistics are those of one device."
        )
    words = [f"nodes={first.num_nodes}", f"steps={study.steps * last.num_nodes // first.num_nodes}"]
    growth = last.global_batch_size / first.global_batch_size
    return (
        f"Metrics are after equal steps, in which nodes={last.num_nodes} has seen {growth:g} times the samples of "
        f"nodes={first.num_nodes}. A scaling rule for the learning rate promises equal metrics after equal samples. "
        f"To measure those, type:\n{shlex.join(['python', 'tools/scale.py', *words, *study.words])}"
    )


def explain_accuracy(study: ScalingStudy, points: Sequence[ScalingPoint]) -> str:
    """Return why accuracy often falls from 1 GPU to 4 GPUs to 2 nodes, and what this study does about it."""
    first, last = points[0], points[-1]
    batches = f"from {first.global_batch_size} to {last.global_batch_size}"
    if study.scaling == "strong":
        setting = f"the batch stays {first.global_batch_size}, so that all points make the same {study.steps} updates"
    elif last.lr_rule == "keep":
        setting = f"it grows too, {batches}, and the rate stays, because of lr=keep"
    else:
        warmup = "" if last.warmup_steps is None else f", after {last.warmup_steps} steps of warm-up"
        rates = f"the rate with it from {first.lr:.4g} to {last.lr:.4g} (lr={last.lr_rule})"
        setting = f"it grows {batches}, and {rates}{warmup}"
    return (
        "Accuracy often falls from 1 GPU to 4 GPUs to 2 nodes because the global batch grows with them unnoticed: "
        f"fewer updates per epoch, at the same learning rate; here {setting}."
    )


def wrap_notes(notes: Sequence[str]) -> list[str]:
    """Return the notes as lines for the terminal. A command line in a note is not broken."""
    lines = []
    for note in notes:
        text, *commands = note.split("\n")
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines += (f"  {command}" for command in commands)
    return lines
