"""Find the first difference between the logs of two runs."""

import csv
import re
from pathlib import Path

# Times and the number of the attempt differ between twins. So do Lightning's batch counts of interrupted validations,
# which it does not use, and the planned length of training when it was saved.
OWN = re.compile(
    r"attempt|'Timer|time_elapsed|seconds|fp32_flat_groups|perf/|node/|val_loop\.batch_progress"
    r"|'Hyperparameters.*length|\['position'\]\['ends'\]"
)


def near(values: list[float], others: list[float], tolerance: float) -> bool:
    return len(values) == len(others) and all(
        repr(a) == repr(b) or abs(a - b) <= tolerance * max(1.0, abs(b)) for a, b in zip(values, others, strict=True)
    )


def curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every scalar that TensorBoard shows, except those that depend on time and hardware."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not OWN.search(tag)]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


# These curves are equal in every layout; others depend on the micro-batch of one rank.
OF_ALL_RANKS = re.compile(r"^(step/(loss|lr|grad_norm)|lr-.*|own/metric|val/.*|test/.*)$")


def curves_differ(reference: Path, run_dir: Path, tolerance: float, moved: bool) -> str:
    wanted, found = curves(reference), curves(run_dir)
    if moved:  # some have one point per micro-batch
        wanted, found = (
            {tag: sorted(dict(points).items()) for tag, points in drawn.items() if OF_ALL_RANKS.match(tag)}
            for drawn in (wanted, found)
        )
    for tag in sorted(wanted | found):
        a, b = found.get(tag, []), wanted.get(tag, [])
        if [step for step, _ in a] != [step for step, _ in b]:
            return f"curve {tag}: steps {[step for step, _ in a]} instead of {[step for step, _ in b]}"
        for (step, value), (_, other) in zip(a, b, strict=True):
            if not near([value], [other], max(tolerance, 1e-6) if tolerance else 0.0):  # curves are in fp32
                return f"curve {tag} at step {step}: {value} instead of {other}"
    return "" if moved else _tables(reference, run_dir)


def _tables(reference: Path, run_dir: Path) -> str:
    """Return CSVLogger's values by step, independent of the order of columns and the number of rows per step."""
    wanted, found = _rows(reference), _rows(run_dir)
    return f"metrics.csv: {min(odd)} is in one table only" if (odd := wanted ^ found) else ""


def _rows(run_dir: Path) -> set[str]:
    rows = [row for file in sorted(run_dir.rglob("metrics.csv")) for row in csv.DictReader(file.open())]
    return {
        f"step {row['step']} {key} {value}"
        for row in rows
        for key, value in row.items()
        if value and not OWN.search(key)
    }
