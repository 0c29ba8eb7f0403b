"""Check that checkpoints are written in the background, by all ranks or by none, with real gloo processes."""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc.checkpoint import on_disk
from hpc.checkpoint.writer import CheckpointNotWritten, CheckpointWriter

BIG = bytes(2**20)


def save(writer: CheckpointWriter, run_dir: Path, step: int, write: Callable[[Path], Any] | None = None) -> None:
    """Start to save a step; each rank writes its own file."""
    final = on_disk.checkpoint_path(run_dir, step, 1)
    mine = write or (lambda part: (part / f"rank-{writer.rank}").write_bytes(bytes([writer.rank]) * 1000))
    writer.start_write(writer.prepare_folder(final), final, details={"step": step, "attempt": 1}, write=mine)


def whole(run_dir: Path) -> list[int]:
    """Return the steps that have complete checkpoints."""
    return [found.step for found in on_disk.list_checkpoints(run_dir) if not on_disk.find_flaw(found)]


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    writer, goes_on = CheckpointWriter(), threading.Event()
    save(writer, tmp_path, 1, lambda part: goes_on.wait(30) and (part / "file").write_text("slow"))
    assert writer.is_busy and on_disk.list_checkpoints(tmp_path) == []
    time.sleep(0.1)
    goes_on.set()
    writer.wait()
    assert not writer.is_busy and whole(tmp_path) == [1]
    assert on_disk.list_checkpoints(tmp_path)[0].details["seconds"] >= 0.1


def test_the_next_waits_for_the_one_before(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    save(writer, tmp_path, 1, lambda part: time.sleep(0.3))
    save(writer, tmp_path, 2)
    assert whole(tmp_path)[-1] == 1
    writer.wait()
    assert whole(tmp_path) == [2, 1]


def test_what_is_held_is_written_when_it_is_released_or_waited_for_and_never_once_it_is_dropped(tmp_path: Path) -> None:
    writer = CheckpointWriter()
    writer.defer_writes()
    save(writer, tmp_path, 1)
    assert not writer.is_busy
    save(writer, tmp_path, 2)  # waits for the one before
    assert whole(tmp_path) == [1]
    writer.start_deferred_write()
    writer.wait()
    assert whole(tmp_path) == [2, 1]
    writer.defer_writes()
    save(writer, tmp_path, 3)
    writer.discard_deferred_write()
    writer.wait()
    assert whole(tmp_path) == [2, 1]


def test_what_is_done_afterwards_finds_it_whole(tmp_path: Path) -> None:
    writer, final, seen = CheckpointWriter(), on_disk.checkpoint_path(tmp_path, 1, 1), []
    writer.start_write(
        writer.prepare_folder(final),
        final,
        details={"step": 1, "attempt": 1},
        write=lambda part: None,
        on_published=lambda path: seen.append(whole(tmp_path)),
    )
    writer.wait()
    assert seen == [[1]]


def every_rank_writes(rank: int, run_dir: str) -> list[str]:
    writer = CheckpointWriter()
    save(writer, Path(run_dir), 1)
    writer.wait()
    (found,) = on_disk.list_checkpoints(Path(run_dir))
    assert not on_disk.find_flaw(found)
    return sorted(found.files)


@pytest.mark.slow
def test_a_checkpoint_holds_what_every_rank_has_written(together: Callable, tmp_path: Path) -> None:
    assert together(every_rank_writes, 3, str(tmp_path)) == [["rank-0", "rank-1", "rank-2"]] * 3


def no_room_on_rank_1(rank: int, run_dir: str) -> list[Any]:
    """Let the kernel fail a write in the middle of a file, as on a full disk."""
    writer = CheckpointWriter()
    save(writer, Path(run_dir), 1)
    writer.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(BIG) // 2, before[1]))
    told = []
    for _ in range(2):  # a failed write must not block the next one
        save(writer, Path(run_dir), 2, lambda part: (part / f"rank-{rank}").write_bytes(BIG))
        try:
            writer.wait()
        except CheckpointNotWritten as error:
            told.append(str(error))
        told.append(whole(Path(run_dir)))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return told


@pytest.mark.soak
def test_an_error_on_one_rank_is_told_on_all_and_leaves_the_earlier_one(together: Callable, tmp_path: Path) -> None:
    words = "rank 1: OSError: [Errno 27] File too large"
    assert together(no_room_on_rank_1, 2, str(tmp_path)) == [[words, [1], [2, 1]]] * 2


def an_error_that_is_asked_for_late(rank: int, run_dir: str) -> str:
    def fail(part: Path) -> None:
        raise RuntimeError("a bad\nday")

    writer = CheckpointWriter()
    save(writer, Path(run_dir), 1, fail if rank == 0 else None)
    try:
        save(writer, Path(run_dir), 2)
    except CheckpointNotWritten as error:
        return str(error)
    return "nothing"


@pytest.mark.soak
def test_an_error_comes_at_the_next_save_at_the_latest(together: Callable, tmp_path: Path) -> None:
    assert together(an_error_that_is_asked_for_late, 2, str(tmp_path)) == ["rank 0: RuntimeError: a bad\nday"] * 2
    assert whole(tmp_path) == []


def torchs_own_word(rank: int, run_dir: str) -> str:
    from torch.distributed.checkpoint.api import CheckpointException

    def full(part: Path) -> None:
        raise CheckpointException("", {1: (OSError(28, "No space left on device"), None)})  # type: ignore[dict-item]

    writer = CheckpointWriter()
    save(writer, Path(run_dir), 1, full)
    try:
        writer.wait()
    except CheckpointNotWritten as error:
        return str(error)
    return "written"


@pytest.mark.soak
def test_what_torch_makes_of_an_error_is_told_by_its_cause(together: Callable, tmp_path: Path) -> None:
    for said in together(torchs_own_word, 2, str(tmp_path)):
        assert "No space left on device" in said and "rank 1" in said


def dies_while_it_writes(rank: int, run_dir: str) -> str:
    writer = CheckpointWriter()
    save(writer, Path(run_dir), 1)
    writer.wait()
    save(writer, Path(run_dir), 2, lambda part: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None)
    try:
        writer.wait()
    except Exception as error:
        return type(error).__name__
    return "nothing"


@pytest.mark.soak
def test_what_a_killed_rank_had_a_share_in_is_no_checkpoint(together: Callable, tmp_path: Path) -> None:
    survivor, killed = together(dies_while_it_writes, 2, str(tmp_path))
    assert survivor != "nothing" and killed is None
    assert whole(tmp_path) == [1] and [found.step for found in on_disk.list_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("what", ["begin", "finish"])
def test_a_folder_that_cannot_be_made_or_named(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = CheckpointWriter()
    save(writer, tmp_path, 1)
    writer.wait()
    monkeypatch.setattr(on_disk, "make_part_folder" if what == "begin" else "publish", reject)
    with pytest.raises(CheckpointNotWritten, match=r"rank 0: OSError.*No space left"):
        save(writer, tmp_path, 2)
        writer.wait()
    assert whole(tmp_path) == [1]


class Overtaken:
    """An attempt's claim that another attempt takes over."""

    def __init__(self, asked: int) -> None:
        self.left = asked  # number of times that the claim is still ours

    def may_write(self) -> bool:
        self.left -= 1
        return self.left >= 0


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_who_is_fenced_off_changes_nothing(asked: int, tmp_path: Path) -> None:
    """Fence off an attempt before it writes, before it publishes, and before it prunes."""
    writer, theirs = CheckpointWriter(), tmp_path / "checkpoints" / "step-000000009-001.part"
    for step in (1, 2):
        save(writer, tmp_path, step)
        writer.wait()
    theirs.mkdir()
    writer.claim = Overtaken(asked)
    final, said, removed = on_disk.checkpoint_path(tmp_path, 3, 1), "", []
    try:
        part = writer.prepare_folder(final)
        details = {"step": 3, "attempt": 1}
        writer.start_write(part, final, details=details, write=lambda part: None, on_published=removed.append)
        writer.wait()
    except CheckpointNotWritten as error:
        said = str(error)
    assert "another attempt has taken over" in said
    assert whole(tmp_path) == ([3, 2, 1] if asked == 2 else [2, 1]) and removed == []
    assert theirs.exists() == (asked == 0)
