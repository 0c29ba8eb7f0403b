"""Find the first difference between a run and its interrupted twin: steps, curves, the last checkpoint, files."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from twin_curves import OWN, curves_differ, near

UNLIKE_FILES = re.compile(
    r"\.log$|^claims/|^attempts\.jsonl$|^config-\d+\.yaml$|^overrides\.json$|^monitor/|^logs/|^errors/"
)


def differences(reference: Path, run_dir: Path, draw: dict[str, Any]) -> str:
    """Return the first difference, or "". Values must be bitwise equal; if the run moves, within the tolerance."""
    moved, tolerance = bool(draw["moves"]), draw["tolerance"]
    if moved:
        found = _steps_moved(reference, run_dir, tolerance)
    else:
        found = next(filter(None, (_steps(reference, run_dir, rank) for rank in range(draw["ranks"]))), "")
    found = found or curves_differ(reference, run_dir, tolerance, moved)
    return found or _state(reference, run_dir, tolerance, moved) or _files(reference, run_dir)


# Records of each rank


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
    return set(json.loads(run_dir.with_name(f"{run_dir.name}.codes-{number:02}").read_text())) == {85}


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


# Files of the run directory


def state(run_dir: Path, tensors_only: bool) -> dict[str, Any]:
    """Return every leaf of the last checkpoint by its path: weights, optimizers, callbacks, loops, state of ranks."""
    from torch.utils._pytree import keystr, tree_flatten_with_path

    from hpc.checkpoint import safe_unpickle as inert
    from hpc.checkpoint import weights

    last = run_dir / "checkpoints" / "last.ckpt"
    found: dict[str, Any] = {}
    before, weights.PREFIX = weights.PREFIX, ""
    try:
        found |= weights.read(last)
    finally:
        weights.PREFIX = before
    for file in sorted(last.rglob("*.pt")) if not tensors_only else []:
        leaves, _ = tree_flatten_with_path(_opened(inert.load_plain(file)))
        found |= {f"{file.relative_to(last)} {keystr(path)}": leaf for path, leaf in leaves}
    return {key: leaf for key, leaf in found.items() if not OWN.search(key)}


def _opened(node: Any) -> Any:
    """Convert DeepSpeed's objects to dicts of their attributes."""
    if isinstance(node, dict):
        return {key: _opened(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_opened(value) for value in node]
    return _opened(vars(node)) if type(node).__name__ == "_InertObject" else node


def _state(reference: Path, run_dir: Path, tolerance: float, moved: bool) -> str:
    import torch

    wanted, found = state(reference, moved), state(run_dir, moved)
    if odd := sorted(wanted.keys() ^ found.keys()):
        return f"last.ckpt: {odd[0]} is in one of them only"
    for key, value in wanted.items():
        other = found[key]
        if isinstance(value, torch.Tensor):
            alike = (value.shape, value.dtype) == (other.shape, other.dtype) and (
                torch.equal(value, other) or torch.allclose(value, other, rtol=0, atol=tolerance, equal_nan=True)
            )
            if not alike:
                kinds = [f"{tuple(one.shape)} {one.dtype}" for one in (other, value)]
                if kinds[0] != kinds[1]:
                    return f"last.ckpt: {key} is {kinds[0]} instead of {kinds[1]}"
                return f"last.ckpt: {key} differs by {float((value.double() - other.double()).abs().max())}"
        elif _step_of(repr(value)) != _step_of(repr(other)):
            return f"last.ckpt: {key} is {str(other)[:80]} instead of {str(value)[:80]}"
    return ""


def _files(reference: Path, run_dir: Path) -> str:
    wanted, found = _names(reference), _names(run_dir)
    if odd := sorted(wanted ^ found):
        return f"the file {odd[0]} is in one run directory only"
    if "outcome finished" not in (run_dir / "verdict").read_text():
        return "the verdict is not: finished"
    for link in ("last.ckpt", "best.ckpt"):
        a, b = (path / "checkpoints" / link for path in (run_dir, reference))
        if a.is_symlink() and (not a.exists() or _step_of(str(a.readlink())) != _step_of(str(b.readlink()))):
            return f"{link} leads to {a.readlink()} instead of {b.readlink()}"
    return ""


def _step_of(text: str) -> str:
    """Return names of checkpoints in a text without the attempts that have written them."""
    return re.sub(r"(step-\d{9})(-\d{3})+", r"\1", text)


def _names(run_dir: Path) -> set[str]:
    """Return the names of files, except those that may differ: earlier checkpoints, names with processes or times."""
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if not path.is_dir() or path.is_symlink()}
    last = (run_dir / "checkpoints" / "last.ckpt").resolve().name
    kept = {name for name in names if not UNLIKE_FILES.search(name)}
    kept = {name for name in kept if not name.startswith("checkpoints/step-") or f"/{last}/" in name}
    # The number of ranks, and of tensor files per rank, depends on the layout.
    return {
        re.sub(r"tfevents\..*", "tfevents", _step_of(name))
        for name in kept
        if not re.search(r"\.distcp$|rank-\d+\.pt$", name)
    }
