"""Check that values of a wrong type, and missing folders, in the files of a run are damage, and never a traceback."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc.logging import positions
from hpc.report import overview
from hpc.run import attempt_log, claim, history, skipped_samples

START = {
    "event": "start", "attempt": 1, "time": 1e9, "job": "17", "from_step": 0, "hosts": ["n1"], "world_size": 2,
    "gpus_per_node": 0, "launcher": "srun", "code": "ab", "log_dirs": ["tensorboard"], "writer": "n1.7",
    "logs": {"tensorboard/x": 3}, "reached": {"tensorboard/x": 5}, "logger_ids": {"wandb": "ab"},
}  # fmt: skip
END = {
    "event": "end",
    "attempt": 1,
    "time": 1e9 + 60,
    "outcome": "finished",
    "step": 100,
    "why": "",
    "metrics": {"a": 1.5},
}
TRAINED = {"event": "trained", "time": 1e9 + 50, "attempt": 1, "trained_step": 100, "trained_batches": 100, "logs": {}}
SUBMITTED = {
    "time": 1e9 - 60, "cluster": "slurm", "scheduler": "slurm", "argv": [], "name": "x", "nodes": 1, "gpus_per_node": 0,
    "seconds": 3600, "job": "17", "jobs": ["17"], "error": None,
}  # fmt: skip
PHASE = {"what": "epoch", "begin": 1e9, "end": 1e9 + 9, "attempt": 1, "step": 4}
CLAIM = {"job": "17", "restart": 0, "host": "n1", "pid": 4, "process": ["a", "b", 4, 5], "stop": "scancel"}
FILES: dict[str, list[dict[str, Any]]] = {
    "attempts.jsonl": [START, TRAINED, END],
    "submitted.json": [SUBMITTED],
    "monitor/phases.jsonl": [PHASE],
    "skipped.jsonl": [{"step": 9, "attempt": 1}],
    "claims/000001.json": [CLAIM],
    "made_by.json": [{"commit": "ab", "dirty": False, "versions": {"torch": "2"}}],
}
TYPES = ["100", 1.5, [1], {"a": 1}, None]


def written(folder: Path, name: str, lines: list[dict[str, Any]]) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def wrong() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each file with a value of another type in one field, and without that field."""
    for name, lines in FILES.items():
        for number, line in enumerate(lines):
            for field in line:
                others = [line | {field: value} for value in TYPES if type(value) is not type(line[field])]
                for changed in [*others, {key: value for key, value in line.items() if key != field}]:
                    yield name, [changed if place == number else one for place, one in enumerate(lines)]


def read(folder: Path) -> list[str]:
    """Read the run as a report, a table, a claim and a resume do."""
    said = overview.write_report(history.read_run(folder, "x"))
    claim.newest_attempt(folder)
    events = attempt_log.read_events(folder)
    skipped_samples.num_skipped_batches(folder, 3, attempt=1)
    positions.truncate_logs(folder, [], positions={}, writers=positions.writers(events))
    claim.is_claim_before_requeue(folder, {"job": "17", "restart": 1, "host": "n1"})
    return said + overview.write_report_or_table([folder.parent])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path))  # no scheduler answers
    made = tmp_path / "runs/x"
    for name, lines in FILES.items():
        written(made, name, lines)
    (made / "config.yaml").write_text("name: x\ntrainer:\n  max_steps: 100\n")
    (made / "verdict").write_text("attempt 1\nstep 100\noutcome finished\nwhy -\n")
    return made


@pytest.mark.slow
def test_a_value_of_another_type_is_damage(folder: Path) -> None:
    assert any("finished" in line for line in read(folder))
    for name, lines in wrong():
        written(folder, name, lines)
        try:
            assert read(folder)
        except Exception as error:
            raise AssertionError(f"{name} {lines}") from error
        written(folder, name, FILES[name])
    assert any("100" in line for line in read(folder))


def test_a_missing_folder_or_file_is_no_error(folder: Path) -> None:
    for name in ("monitor", "claims", "attempts.jsonl", "submitted.json", "verdict", "config.yaml", "made_by.json"):
        kept = folder.with_name("kept")
        shutil.copytree(folder, kept)
        (shutil.rmtree if (folder / name).is_dir() else Path.unlink)(folder / name)
        read(folder)
        shutil.rmtree(folder)
        kept.rename(folder)
