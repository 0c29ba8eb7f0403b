"""Check that a checkpoint is complete or absent after any crash, and that checkpoints are found by their content."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc.checkpoint import on_disk
from hpc.config.errors import ConfigError

FILES = {"meta.pt": b"numbers", "__0_0.distcp": bytes(range(256)) * 40, "checkpoint/zero.pt": b"deeper", "empty": b""}


def written(run_dir: Path, step: int, attempt: int = 1, **note: Any) -> Path:
    """Write a complete checkpoint in one process."""
    final = on_disk.checkpoint_path(run_dir, step, attempt)
    part = on_disk.make_part_folder(final)
    for name, content in FILES.items():
        (part / name).parent.mkdir(exist_ok=True)
        (part / name).write_bytes(content)
    on_disk.make_durable(part)
    files = on_disk.checksums(part, on_disk.file_names(part))
    on_disk.publish(part, final, files=files, details={"step": step, "attempt": attempt, **note})
    return final


def steps(run_dir: Path, *starts: dict[str, int]) -> list[int]:
    return [found.step for found in on_disk.list_checkpoints(run_dir, starts)]


def folders(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def edit(final: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change entries of the manifest."""
    note = json.loads((final / on_disk.MANIFEST).read_text())
    change(note)
    (final / on_disk.MANIFEST).write_text(json.dumps(note))


# -- Known checkpoints --


def test_what_is_published_is_whole(tmp_path: Path) -> None:
    final = written(tmp_path, 380, attempt=3, strategy="DDP", seconds=0.5)
    assert folders(tmp_path) == ["step-000000380-003"]
    (found,) = on_disk.list_checkpoints(tmp_path)
    assert (found.path, found.step, found.attempt) == (final, 380, 3)
    assert found.details == {"strategy": "DDP", "seconds": 0.5}
    assert set(found.files) == set(FILES) == set(on_disk.file_names(final))
    assert on_disk.find_flaw(found) == ""


def test_the_newest_is_known_by_its_manifest_and_not_by_name_or_time(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        written(tmp_path, step)
    there = tmp_path / "checkpoints"
    (there / "step-000000030-001").rename(there / "step-000000005-001")
    (there / "step-000000010-001").rename(there / "step-best so far")
    for age, path in enumerate(sorted(there.iterdir())):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert steps(tmp_path) == [30, 20, 10]


def test_of_one_step_that_of_the_later_attempt_is_newer(tmp_path: Path) -> None:
    first = written(tmp_path, 10, attempt=2)
    first.rename(first.with_name("step-z"))
    written(tmp_path, 10, attempt=11)
    assert [found.attempt for found in on_disk.list_checkpoints(tmp_path)] == [11, 2]


def test_what_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    final = written(tmp_path, 10)
    final.rename(final.with_name(final.name + on_disk.PART))
    on_disk.make_part_folder(on_disk.checkpoint_path(tmp_path, 20, 1))
    assert steps(tmp_path) == []


def test_no_folder_at_all_is_no_checkpoint(tmp_path: Path) -> None:
    assert steps(tmp_path) == [] and steps(tmp_path / "nowhere") == []


UNREADABLE = {
    "missing": None,
    "empty": b"",
    "cut short": b'{"version": 1, "step": 10, "att',
    "no text": b"\xff\xfe\x00\x80",
    "no object": b"[1, 2]",
    "no step": b'{"version": 1, "attempt": 1, "files": {}}',
    "no files": b'{"version": 1, "step": 10, "attempt": 1}',
    "odd files": b'{"version": 1, "step": 10, "attempt": 1, "files": 3}',
    "odd sums": b'{"version": 1, "step": 10, "attempt": 1, "files": {"a": [1]}}',
    "odd step": b'{"version": 1, "step": "x", "attempt": 1, "files": {}}',
    "odd steps tried": b'{"version": 1, "step": 1, "attempt": 1, "files": {}, "stepped": "x"}',
    "odd world": b'{"version": 1, "step": 1, "attempt": 1, "files": {}, "world_size": [2]}',
    "endless step": b'{"version": 1, "step": Infinity, "attempt": 1, "files": {}}',
    "a folder": ...,
}


@pytest.mark.parametrize("what", UNREADABLE)
def test_without_a_manifest_that_can_be_read_it_is_none(what: str, tmp_path: Path) -> None:
    written(tmp_path, 10)
    manifest = written(tmp_path, 20) / on_disk.MANIFEST
    manifest.unlink()
    content = UNREADABLE[what]
    if content is ...:
        manifest.mkdir()
    elif content is not None:
        manifest.write_bytes(content)
    assert steps(tmp_path) == [10] and on_disk.read_manifest(manifest.parent) is None


@pytest.mark.parametrize("layout", ["alike", "another"])
def test_one_of_a_newer_version_is_rejected_and_not_passed_over(layout: str, tmp_path: Path) -> None:
    written(tmp_path, 10)
    newer = written(tmp_path, 20)
    edit(newer, lambda note: note.update(version=on_disk.VERSION + 1))
    if layout == "another":
        edit(newer, lambda note: (note.pop("step"), note.pop("files")))
    with pytest.raises(ConfigError, match="newer version") as caught:
        on_disk.list_checkpoints(tmp_path)
    assert str(newer) in str(caught.value)


def test_what_a_later_attempt_has_overtaken_is_left_out(tmp_path: Path) -> None:
    starts = [{"attempt": 1, "from_step": 0}, {"attempt": 2, "from_step": 10}, {"attempt": 3, "from_step": 20}]
    for step, attempt in ((10, 1), (15, 1), (20, 2), (30, 2), (40, 3)):
        written(tmp_path, step, attempt)
    assert steps(tmp_path) == [40, 30, 20, 15, 10]
    assert steps(tmp_path, *starts) == [40, 20, 10]  # attempts 1 and 2 wrote 15 and 30 after they were overtaken
    assert steps(tmp_path, {"attempt": 4}) == []  # attempt 4 started from scratch


# -- Damage --


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


DAMAGE = {
    "truncated": (truncate, "has 10239 bytes instead of 10240"),
    "a byte flipped": (flip, "has changed since it was written"),
    "grown": (grow, "has 10241 bytes"),
    "missing": (Path.unlink, "No such file"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "directory"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_seen_and_named(what: str, tmp_path: Path) -> None:
    damage, words = DAMAGE[what]
    final = written(tmp_path, 10)
    damage(final / "__0_0.distcp")
    (found,) = on_disk.list_checkpoints(tmp_path)
    assert on_disk.find_flaw(found).startswith("__0_0.distcp") and words in on_disk.find_flaw(found)


@pytest.mark.parametrize("name", FILES)
def test_of_several_ranks_one_looks_at_each_file(name: str, tmp_path: Path) -> None:
    final = written(tmp_path, 10)
    (found,) = on_disk.list_checkpoints(tmp_path)
    assert [on_disk.find_flaw(found, rank=rank, num_ranks=3) for rank in range(3)] == [""] * 3
    (final / name).unlink()
    assert sum(name in on_disk.find_flaw(found, rank=rank, num_ranks=3) for rank in range(3)) == 1


# -- Writing, linking and pruning --


def test_what_was_left_behind_is_removed_before_the_next_is_written(tmp_path: Path) -> None:
    """Check that unfinished checkpoints of other steps are removed too.

    On a full disk the next checkpoint needs their space.
    """
    written(tmp_path, 5)
    for step in (10, 20):
        (on_disk.make_part_folder(on_disk.checkpoint_path(tmp_path, step, 1)) / "left").write_text("behind")
    (tmp_path / "checkpoints" / "step-000000005.universal-a_1.part").mkdir()  # converted for other ranks
    part = on_disk.make_part_folder(on_disk.checkpoint_path(tmp_path, 10, 1))
    assert list(part.iterdir()) == [] and folders(tmp_path) == ["step-000000005-001", "step-000000010-001.part"]
    written(tmp_path, 10)
    assert steps(tmp_path) == [10, 5]


def test_a_step_that_is_saved_again_has_another_name_and_nothing_is_replaced(tmp_path: Path) -> None:
    truncate(written(tmp_path, 10) / "meta.pt")
    written(tmp_path, 10, attempt=2)
    found, damaged = on_disk.list_checkpoints(tmp_path)
    assert found.attempt == 2 and on_disk.find_flaw(found) == "" and on_disk.find_flaw(damaged)
    with pytest.raises(FileExistsError):
        written(tmp_path, 10, attempt=2)
    assert on_disk.find_flaw(found) == "" and steps(tmp_path) == [10, 10]
    again = on_disk.checkpoint_path(tmp_path, 10, 2, num_before=1)
    on_disk.publish(on_disk.make_part_folder(again), again, files={}, details={"step": 10, "attempt": 2, "batches": 3})
    averaged = on_disk.checkpoint_path(tmp_path, 10, 2, averaged=True)
    names = [path.name for path in on_disk.own_folders(tmp_path / "checkpoints")] + [averaged.name]
    assert names == sorted(names) and on_disk.list_checkpoints(tmp_path)[0].path == again


def test_a_link_leads_to_a_checkpoint_also_when_the_run_is_moved(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    link = run_dir / "checkpoints" / "last.ckpt"
    for step in (10, 20):
        final = written(run_dir, step)
        link.with_name(f".last.ckpt{on_disk.PART}").symlink_to("nowhere")  # left by a crash
        on_disk.set_link(link, final)
        assert link.resolve() == final.resolve()
    assert folders(run_dir) == ["last.ckpt", "step-000000010-001", "step-000000020-001"]
    moved = run_dir.rename(tmp_path / "moved")
    assert (found := on_disk.read_manifest(moved / "checkpoints" / "last.ckpt")) and found.step == 20


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(1, None, [40]), (2, None, [30, 40]), (2, 10, [10, 30, 40]), (2, 40, [30, 40]), (9, None, [10, 20, 30, 40])],
)
def test_the_last_ones_and_the_best_are_kept(keep: int, best: int | None, left: list[int], tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 50):  # an overtaken attempt wrote 50
        written(tmp_path, step)
    on_disk.make_part_folder(on_disk.checkpoint_path(tmp_path, 25, 1))
    link = tmp_path / "checkpoints" / on_disk.BEST
    if best:
        on_disk.set_link(link, on_disk.checkpoint_path(tmp_path, best, 1))
    on_disk.prune(on_disk.checkpoint_path(tmp_path, 40, 1), keep)
    link.unlink(missing_ok=True)
    assert folders(tmp_path) == [f"step-{step:09d}-001" for step in left]


def test_what_others_put_there_stays(tmp_path: Path) -> None:
    """Check that folders of other programs with similar names are kept."""
    there = tmp_path / "checkpoints"
    others = ["step-500", "step-500.part", "step-000000500.pt", "step-1.ckpt.part", "step-000000500.old", "epoch-1"]
    for name in others:
        (there / name).mkdir(parents=True)
        (there / name / "weights").write_text("precious")
    for step in (10, 20, 30):
        on_disk.prune(written(tmp_path, step), 1)
    assert folders(tmp_path) == sorted([*others, "step-000000030-001"])
    assert all((there / name / "weights").exists() for name in others)


# -- The links after a crash --


def links(run_dir: Path) -> dict[str, str]:
    return {path.name: os.readlink(path) for path in (run_dir / "checkpoints").iterdir() if path.is_symlink()}


@pytest.mark.parametrize("best", [10, 20, 30, None])
def test_the_links_lead_where_the_run_that_goes_on_knows_them(best: int | None, tmp_path: Path) -> None:
    """Check the links of a run that resumes from step 20. Step 30 is damaged, or an overtaken attempt wrote it."""
    for step in (10, 20):
        written(tmp_path, step)
    there = tmp_path / "checkpoints"
    for name in (on_disk.LAST, on_disk.BEST):
        on_disk.set_link(there / name, there / "step-000000030-001")
    place = on_disk.checkpoint_path(tmp_path, best, 1) if best else None
    assert on_disk.repair_links(on_disk.checkpoint_path(tmp_path, 20, 1), place) == (best in (10, 20))
    leads = {"best.ckpt": f"step-{best:09d}-001"} if best in (10, 20) else {}
    assert links(tmp_path) == {"last.ckpt": "step-000000020-001"} | leads


@pytest.mark.parametrize("left_out", ["", "step-000000010*", "step-000000010*/manifest.json"])
def test_a_copy_in_the_place_of_a_link_is_answered_by_the_command_that_puts_it_right(
    left_out: str, tmp_path: Path
) -> None:
    """Check what `scp -r` and `cp -rL` make of a link, also without the checkpoint that it led to, or half of it."""
    there = tmp_path / "a run/checkpoints"
    for step, name in ((10, on_disk.BEST), (20, on_disk.LAST)):
        on_disk.set_link(there / name, written(tmp_path / "a run", step))
    on_disk.reject_copied_links(there)
    copied = tmp_path / "a copy/checkpoints"
    shutil.copytree(there, copied)
    for path in copied.glob(left_out) if left_out else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for _ in range(2):
        with pytest.raises(ConfigError, match="scp -r and cp -rL make a folder of it") as caught:
            on_disk.reject_copied_links(copied)
        subprocess.run(caught.value.fix, shell=True, check=True)
    on_disk.reject_copied_links(copied)
    assert steps(tmp_path / "a copy") == [20, 10] and not list(copied.glob("*.ckpt"))
    assert all(not on_disk.find_flaw(found) for found in on_disk.list_checkpoints(tmp_path / "a copy"))


# -- Killed at every single moment --


def write(run_dir: Path, step: int, attempt: int) -> None:
    """Write, link and prune checkpoints as a run does."""
    final = written(run_dir, step, attempt)
    on_disk.set_link(run_dir / "checkpoints" / "last.ckpt", final)
    on_disk.prune(final, 1)


def die(moment: int) -> None:
    """Kill this process just before file system operation number `moment`, counted from now."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.scandir"):
            count += 1
            if count > moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def die_at_every_moment(folder: Path, step: int) -> None:
    """Leave run directories 000, 001, ... whose writers were killed after 0, 1, ... file system operations.

    Each already had a checkpoint of step 10.
    """
    write(folder / "begun", 10, 1)
    for moment in range(200):
        run_dir = folder / f"{moment:03}"
        shutil.copytree(folder / "begun", run_dir, symlinks=True)
        if not (pid := os.fork()):
            die(moment)
            write(run_dir, step, 2)
            os._exit(0)
        if os.waitpid(pid, 0)[1] == 0:  # not killed: the write was complete
            return


@pytest.mark.slow
@pytest.mark.parametrize("step", [20, 10], ids=["the next step", "the same step again"])
def test_who_is_killed_at_any_moment_leaves_nothing_that_cannot_be_read(step: int, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")  # its processes have no threads
    context.set_forkserver_preload(["torch.distributed"])
    writer = context.Process(target=die_at_every_moment, args=(tmp_path, step), daemon=True)
    writer.start()
    writer.join(60)
    assert writer.exitcode == 0
    seen = []
    for run_dir in sorted(tmp_path.glob("[0-9]*")):
        whole = on_disk.list_checkpoints(run_dir)
        assert whole and not [found for found in whole if on_disk.find_flaw(found)]
        seen.append((whole[0].step, whole[0].attempt))
        link = run_dir / "checkpoints" / "last.ckpt"
        assert link.resolve() in [found.path.resolve() for found in whole]
        write(run_dir, step, 3)  # the next start removes what is left
        assert folders(run_dir) == ["last.ckpt", f"step-{step:09d}-003"]
        assert (found := on_disk.read_manifest(run_dir / "checkpoints" / "last.ckpt")) and not on_disk.find_flaw(found)
    before, after = seen.count((10, 1)), seen.count((step, 2))
    assert before > 20 and after > 10 and seen == [(10, 1)] * before + [(step, 2)] * after
