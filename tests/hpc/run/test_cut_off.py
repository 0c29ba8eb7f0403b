"""Cut off a file's last record at each of its bytes, as a crash may: the records before it must stay readable.

Records that are added afterwards must be complete.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard.writer import SummaryWriter

from hpc.monitor import event_files, node_usage
from hpc.run import attempt_log
from hpc.studies.optuna_study import JournalFileBackend, JournalLock


def add_note(folder: Path, number: int) -> None:
    attempt_log.append_json_line(folder / "attempts.jsonl", {"event": "start", "attempt": number, "why": "ü"})


def journal(folder: Path) -> JournalFileBackend:
    path = folder / "journal.jsonl"
    return JournalFileBackend(str(path), lock_obj=JournalLock(path))


def add_operation(folder: Path, number: int) -> None:
    journal(folder).append_logs([{"op_code": number, "worker_id": "x"}])


def add_row(folder: Path, number: int) -> None:
    sample = {"time": 1000.0 + number, "attempt": 1, "cpu_percent": 12.345 + number, "net_in_mbs": None}
    attempt_log.append_json_line(folder / "node-n1.jsonl", sample)


def points(folder: Path) -> list[Any]:
    return event_files.read_curves(folder).points.get("loss", [])


def rows(folder: Path) -> list[Any]:
    columns = node_usage.read_node(folder / "node-n1.jsonl")[0].columns
    return list(zip(*(columns.get(name, []) for name in ("time", "attempt", "cpu_percent")), strict=True))


# Functions that add a record and that read all records.
FILES: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], list[Any]]]] = {
    "attempts.jsonl": (add_note, lambda folder: attempt_log.read_json_lines(folder / "attempts.jsonl")),
    "journal.jsonl": (add_operation, lambda folder: list(journal(folder).read_logs(0))),
    "node-n1.jsonl": (add_row, rows),
}


@pytest.mark.parametrize("name", FILES)
def test_a_record_that_is_cut_off_at_any_byte(name: str, tmp_path: Path) -> None:
    add, read = FILES[name]
    file = tmp_path / name
    for number in range(3):
        add(tmp_path, number)
    before = file.stat().st_size
    add(tmp_path, 3)
    whole, content = read(tmp_path), file.read_bytes()
    assert len(whole) == 4
    for size in range(before, len(content)):
        file.write_bytes(content[:size])
        known = read(tmp_path)
        assert known in (whole[:3], whole), f"cut off at {size - before} of {len(content) - before} bytes"
        add(tmp_path, 4)
        assert read(tmp_path) == [*known, _next(add, read, tmp_path, file)]


def _next(add: Callable[[Path, int], None], read: Callable[[Path], list[Any]], folder: Path, file: Path) -> Any:
    """Return record number 4 as it is read from a separate file."""
    alone = folder / "alone"
    alone.mkdir(exist_ok=True)
    (alone / file.name).unlink(missing_ok=True)
    add(alone, 4)
    return read(alone)[0]


def test_curves_that_are_cut_off_at_any_byte(tmp_path: Path) -> None:
    curves = SummaryWriter(str(tmp_path))
    for step in range(3):
        curves.add_scalar("loss", step / 2, step)
    curves.flush()
    (file,) = tmp_path.iterdir()
    before = file.stat().st_size
    curves.add_scalar("loss", 1.5, 3)
    curves.close()
    whole, content = points(tmp_path), file.read_bytes()
    assert len(whole) == 4 and not event_files.read_curves(tmp_path).notes
    for size in range(before, len(content)):
        file.write_bytes(content[:size])
        assert points(tmp_path) == whole[:3], f"cut off at {size - before} of {len(content) - before} bytes"
        assert bool(event_files.read_curves(tmp_path).notes) == (size > before)
