"""Samples that a run leaves out after a rollback (`faults.nonfinite=rollback`), noted in skipped.jsonl."""

from pathlib import Path

from hpc.run import attempt_log


def record_skip(run_dir: Path, step: int, *, attempt: int) -> None:
    """Record that a resume from an earlier checkpoint must skip all samples up to `step`."""
    attempt_log.append_json_line(run_dir / "skipped.jsonl", {"step": step, "attempt": attempt})


def num_skipped_batches(run_dir: Path, step: int, *, attempt: int) -> int:
    """Return how many global batches to leave out after the checkpoint that this attempt wrote at this step."""
    lines = attempt_log.read_json_lines(run_dir / "skipped.jsonl")
    skips = [line for line in lines if line.keys() >= {"step", "attempt"}]
    return sum(skip["step"] - step for skip in skips if skip["attempt"] >= attempt and skip["step"] > step)
