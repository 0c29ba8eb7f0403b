"""Find the first difference between what the ranks of a run and of its interrupted twin have recorded."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from trial.curves import near

STOPPED = 85


def steps_differ(reference: Path, run_dir: Path, drawn: dict[str, Any]) -> str:
    """Return the first difference, or ""."""
    if drawn["moves"]:
        return _steps_moved(reference, run_dir, drawn["tolerance"])
    return next(filter(None, (_steps(reference, run_dir, rank) for rank in range(drawn["ranks"]))), "")


def attempts(run_dir: Path, rank: int) -> list[list[dict[str, Any]]]:
    files = sorted(run_dir.parent.glob(f"{run_dir.name}-??.{rank}"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def _steps(reference: Path, run_dir: Path, rank: int) -> str:
    (whole,) = attempts(reference, rank)
    wanted = [line for line in whole if line["what"] in ("train", "val", "validated")]
    reached = ended = 0
    last: list[dict[str, Any]] = []
    for number, lines in enumerate(attempts(run_dir, rank)):
        done = [line for line in lines if line["what"] in ("train", "val", "validated")]
        last = [line for line in lines if line["what"] == "test"]
        if not done:
            continue
        begin = next((k for k, line in enumerate(wanted[: reached + 1]) if _place(line) == _place(done[0])), None)
        if begin is None:
            due = _place(wanted[min(reached, len(wanted) - 1)])
            return f"start {number + 1} begins at {_place(done[0])}, where {due} should come"
        if begin and any(line["what"] == "sanity" for line in lines):
            return f"start {number + 1} goes on at {_place(done[0])}, and makes a sanity check before it"
        # Batches of an incomplete step may be repeated.
        again = begin < ended and wanted[ended - 1]["step"] > done[0]["step"]
        if number and again and _stopped(run_dir, number - 1) and not _redone(whole, wanted[begin:ended]):
            return f"start {number + 1} repeats {_place(done[0])}, which was done when the run was stopped"
        for line, other in zip(done, wanted[begin:], strict=False):
            if found := _unlike(line, other):
                return f"start {number + 1}, {found}"
        if len(done) > len(wanted) - begin:
            return f"start {number + 1} goes on beyond the end: {_place(done[len(wanted) - begin])}"
        ended = begin + len(done)
        reached = max(reached, ended)
    if reached < len(wanted):
        return f"ends before {_place(wanted[reached])}"
    tested = [line for line in whole if line["what"] == "test"]
    return next((found for a, b in zip(last, tested, strict=False) if (found := _unlike(a, b))), "") or (
        "" if len(last) == len(tested) else f"{len(last)} batches tested instead of {len(tested)}"
    )


def _redone(whole: list[dict[str, Any]], again: list[dict[str, Any]]) -> bool:
    """Return whether the repeated batches are those of the one step before the first validation.

    If a run is stopped during its first validation, whose duration is unknown, that step is not saved.
    """
    before = [line["what"] for line in whole[: whole.index(again[0])]]
    steps = {line["step"] for line in again if line["what"] == "train"}
    return len(steps) == 1 and not {"sanity", "validated"} & set(before)


def _stopped(run_dir: Path, number: int) -> bool:
    """Return whether all ranks ended this start by agreement, after saving all completed steps."""
    return set(json.loads(run_dir.with_name(f"{run_dir.name}.codes-{number:02}").read_text())) == {STOPPED}


def _place(line: dict[str, Any]) -> str:
    return " ".join(f"{key} {line[key]}" for key in ("what", "step", "epoch", "batch", "loader") if key in line)


def _unlike(line: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the first value that differs, or ""."""
    if _place(line) != _place(other):
        return f"{_place(line)} instead of {_place(other)}"
    keys = [key for key in ("samples", "rates", "loss", "metrics") if key in other]
    for key in keys:
        if repr(line.get(key)) != repr(other[key]):  # NaN equals itself
            return f"{_place(other)}: {key} {line.get(key)} instead of {other[key]}"
    return ""


def _steps_moved(reference: Path, run_dir: Path, tolerance: float) -> str:
    """Compare by global steps, as ranks may have other samples after a move."""
    (wanted,) = _merged(reference)
    first = attempts(reference, 0)[0]
    reached = ended = 0
    for number, steps in enumerate(_merged(run_dir)):
        begun = min(steps, default=reached)
        again = [line for line in first if begun <= line["step"] < ended]
        if number and steps and again and _stopped(run_dir, number - 1) and not _redone(first, again):
            return f"start {number + 1} repeats step {begun}, which was done when the run was stopped"
        if begun > reached:
            return f"start {number + 1} begins at step {begun} instead of {reached}"
        for step, (samples, loss, rates) in sorted(steps.items()):
            if step not in wanted:
                return f"start {number + 1} goes on beyond the end: step {step}"
            if len(samples) < len(wanted[step][0]) and step == max(steps):
                break  # it was killed during this step
            if samples != wanted[step][0]:
                return f"start {number + 1}, samples at step {step}: {samples} instead of {wanted[step][0]}"
            if not near(rates, wanted[step][2], tolerance):
                return f"start {number + 1}, rates at step {step}: {rates} instead of {wanted[step][2]}"
            if not near([loss], [wanted[step][1]], tolerance):
                return f"start {number + 1}, loss at step {step}: {loss} instead of {wanted[step][1]}"
            ended = step + 1
        reached = max(reached, ended)
    return f"ends before step {reached}" if reached <= max(wanted) else ""


def _merged(run_dir: Path) -> list[dict[int, tuple[list[int], float, list[float]]]]:
    """Return samples, mean loss and learning rates by step, for each start."""
    found = []
    starts = sorted({file.stem for file in run_dir.parent.glob(f"{run_dir.name}-??.*")})
    for start in starts:
        steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for file in run_dir.parent.glob(f"{start}.*"):
            for line in map(json.loads, file.read_text().splitlines()):
                if line["what"] == "train":
                    steps[line["step"]].append(line)
        found.append({step: _together(lines) for step, lines in steps.items()})
    return found


def _together(lines: list[dict[str, Any]]) -> tuple[list[int], float, list[float]]:
    """Return the samples of a step, the mean of its losses, and the rates; samples of a micro-batch count alike."""
    batches: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        batches[line["batch"]].append(line)
    means = [
        sum(line["loss"] * len(line["samples"]) for line in parts) / sum(len(line["samples"]) for line in parts)
        for parts in batches.values()
    ]
    samples = sorted(number for line in lines for number in line["samples"])
    return samples, sum(means) / len(means), lines[0]["rates"]
