"""Check that packed files are copied to node-local storage once per node, completely, and only if they fit."""

import fcntl
import multiprocessing
import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from data_nodes import built, make_images, rejected
from fork import free_port
from test_pack import PIXELS, batches, pack_images, pack_text, write_texts
from torch.distributed import TCPStore

from hpc.config.errors import ConfigError
from hpc.packed import checks, packed_images, staging
from hpc.packed import pack_images as pack_images_module
from hpc.packed.staging import StagingProgress
from hpc.run.signals import SignalState
from hpc.run.watchdog import Watchdog
from hpc.system import private_folder


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pack_images_module, "PART_BYTES", 10 * 3 * PIXELS**2)  # ten images a part
    staging.node_local_folder.cache_clear()


@pytest.fixture
def images(tmp_path):
    pack_images(make_images(tmp_path / "images"), tmp_path / "images.npy")
    return str(tmp_path / "images.npy")


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Return node-local storage as a cluster file names it."""
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("NODE_STORAGE", str(tmp_path))
    return "$NODE_STORAGE/local"


def staged(name="packed", **values):
    data = built(name, stage=True, **values)
    data.prepare_data()
    return data


def test_the_copy_is_made_once_and_training_reads_it(tmp_path, images, local, capsys):
    data = staged(file=images, node_local=local)
    (copy,) = (tmp_path / "local").glob("*/images.npy")
    assert data.dataset("train").file == str(copy)
    assert copy.read_bytes() == Path(images).read_bytes()
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
    assert [path.name for path in copy.parent.iterdir()] == ["images.npy"]
    first = copy.stat().st_ino
    again = staged(file=images, node_local=local)
    assert copy.stat().st_ino == first and capsys.readouterr().err.count("copying") == 1
    assert batches(again) == batches(built("packed", file=images))


@pytest.mark.parametrize("damage", ["short", "changed"])
def test_a_copy_that_is_not_whole_is_made_again(tmp_path, images, local, damage):
    staged(file=images, node_local=local)
    (copy,) = (tmp_path / "local").glob("*/images.npy")
    good = copy.read_bytes()
    offset = packed_images.read_packed_images(images).parts.offset
    copy.write_bytes(good[:-9] if damage == "short" else good[:offset] + b"x" + good[offset + 1 :])
    staged(file=images, node_local=local)
    assert copy.read_bytes() == good


def test_a_wrong_copy_is_never_published(tmp_path, images, local, monkeypatch):
    def copied(source, target):
        data, offset = bytearray(Path(source).read_bytes()), packed_images.read_packed_images(images).parts.offset
        data[offset] ^= 1
        Path(target).write_bytes(data)

    monkeypatch.setattr(staging, "copy_file", copied)
    with pytest.raises(ConfigError, match="must hold what was packed"):
        staged(file=images, node_local=local)
    assert [path for path in (tmp_path / "local").rglob("*") if path.is_file()] == []


def test_token_files_are_staged_without_confusing_them(tmp_path, local):
    pack_text(write_texts(tmp_path / "train"), tmp_path / "train.npy")
    pack_text(write_texts(tmp_path / "val", 3), tmp_path / "val.npy")
    values = {"files": f"{tmp_path}/train.npy", "val_files": f"{tmp_path}/val.npy", "block_size": 16}
    data = staged("text", node_local=local, **values)
    for split, name in (("train", "train.npy"), ("val", "val.npy"), ("test", "val.npy")):
        (file,) = data.dataset(split).files
        assert Path(file).parts[-3] == "local" and Path(file).name == name
        assert np.array_equal(np.load(file), np.load(tmp_path / name))
    assert batches(data) == batches(built("text", **values))


def test_staging_that_cannot_work_is_rejected(tmp_path, images, local, monkeypatch):
    assert "cluster.node_local='$TMPDIR'" in rejected(checks.check_packed_images, "packed", file=images, stage=True)
    with pytest.raises(ConfigError, match=r"is expanded to '\$NOT_SET_HERE'"):
        staged(file=images, node_local="$NOT_SET_HERE")
    (tmp_path / "text").write_text("some text " * 50)
    text = {"files": str(tmp_path / "text"), "block_size": 4, "stage": True, "node_local": local}
    assert "was not packed" in rejected(checks.check_text_files, "text", **text)
    with pytest.raises(ConfigError, match="copies files that tools"):
        staged("images", dir=str(tmp_path / "images"))
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match="GB free"):
        staged(file=images, node_local=local)
    assert [path for path in (tmp_path / "local").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("prepared", ["folder", "link"])
def test_a_folder_that_somebody_else_prepared_is_not_used(prepared, tmp_path, images, local):
    folder = Path(staging.staged_path(packed_images.read_packed_images(images).parts, local)).parent
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    if prepared == "link":
        folder.symlink_to(theirs)
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with pytest.raises(ConfigError, match="somebody else"):
        staged(file=images, node_local=local)
    assert not [*theirs.iterdir(), *folder.iterdir()]


def test_a_folder_that_somebody_else_prepares_at_the_last_moment_is_not_used(tmp_path, images, local, monkeypatch):
    folder = Path(staging.staged_path(packed_images.read_packed_images(images).parts, local)).parent
    (tmp_path / "theirs").mkdir()

    def disk_usage(_):
        with suppress(FileExistsError):
            folder.symlink_to(tmp_path / "theirs")
        return SimpleNamespace(free=10**9)

    monkeypatch.setattr(staging.shutil, "disk_usage", disk_usage)
    with suppress(ConfigError):
        staged(file=images, node_local=local)
    assert list((tmp_path / "theirs").iterdir()) == []


def test_runs_of_one_node_share_one_copy(tmp_path, images, local, capfd):
    """Check that runs share one copy, although a killed run has left an unfinished one."""
    folder = Path(staging.staged_path(packed_images.read_packed_images(images).parts, local)).parent
    folder.mkdir(mode=0o700)
    (folder / "images.npy.n1-1.part").write_text("begun")
    runs = [multiprocessing.get_context("fork").Process(target=staged, kwargs={"file": images, "node_local": local})]
    runs += [multiprocessing.get_context("fork").Process(target=staged, kwargs={"file": images, "node_local": local})]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert [run.exitcode for run in runs] == [0, 0] and capfd.readouterr().err.count("copying") == 1
    assert [path.name for path in folder.iterdir()] == ["images.npy"]


@pytest.mark.slow
def test_of_two_ranks_one_copies_and_both_train(tmp_path, images, local, start):
    words = ["data=packed", f"data.file={images}", "data.stage=true", f"cluster.node_local={tmp_path}/local"]
    words += ["data.global_batch_size=4", "model=resnet18", "model.network.depths=[1]", "model.network.widths=[8]"]
    words += ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=2"]
    assert start(tmp_path / "run", 2, words).count("copying") == 1


# Waiting for a copy that grows is not a hang


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["size", "time", "none"])
def test_a_neighbours_copy_is_waited_for_as_long_as_it_grows(sign, images, local, monkeypatch):
    parts = packed_images.read_packed_images(images).parts
    folder = private_folder.make(Path(staging.staged_path(parts, local)).parent)
    theirs, seen, held = folder / "images.npy.elsewhere-1.part", [], os.open(folder, os.O_RDONLY)
    monkeypatch.setattr(staging, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(staging, "on_progress", lambda: seen.append(threading.current_thread()))
    fcntl.flock(held, fcntl.LOCK_EX)
    theirs.write_bytes(b"x")
    waiting = threading.Thread(target=staging.stage_file, args=(parts, local))
    waiting.start()
    limit = time.monotonic() + (0.5 if sign == "none" else 20)
    while len(seen) < 5 and time.monotonic() < limit:
        if sign == "size":
            theirs.write_bytes(theirs.read_bytes() + b"x")
        elif sign == "time":
            os.utime(theirs)
        time.sleep(0.03)
    num = len(seen)
    os.close(held)
    waiting.join(20)
    assert not waiting.is_alive() and Path(staging.staged_path(parts, local)).is_file()
    assert num >= 5 if sign != "none" else num == 0


def test_copying_and_verifying_count_as_progress_which_neighbours_see(images, local, monkeypatch):
    parts, verify_checksums = packed_images.read_packed_images(images).parts, staging.verify_checksums
    folder, seen = Path(staging.staged_path(parts, local)).parent, []
    copied = []

    def verify_later(parts, **arguments):
        copied.extend(seen)
        seen.clear()
        os.utime(parts.file, (0, 0))
        return verify_checksums(parts, **arguments)

    def look():
        (status,) = [path.stat() for path in folder.glob("*.part")]
        seen.append((status.st_size, status.st_mtime))

    monkeypatch.setattr(staging, "verify_checksums", verify_later)
    monkeypatch.setattr(staging, "on_progress", look)
    monkeypatch.setattr(staging, "BLOCK_BYTES", 1000)
    size = Path(staging.stage_file(parts, local)).stat().st_size
    assert [now for now, _ in copied] == [*range(1000, size, 1000), size]
    assert len(seen) == len(parts.sizes) == 8 and all(time > 0 for _, time in seen)


def test_a_copy_is_progress_of_all_ranks_whatever_else_they_exchange(tmp_path, monkeypatch):
    """Check that agreements, which come later, do not take its place, and that the step stays what it was."""
    monkeypatch.setattr(staging, "on_progress", None)
    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    read_fd, write_fd = os.pipe()
    state = SignalState(read_fd=read_fd, write_fd=write_fd)
    exchanged = threading.Event()
    watchdog = Watchdog(tmp_path, None, attempt=1, rank=1, world_size=2, store=store, hang_seconds=60, signals=state)
    with watchdog as watch:
        StagingProgress(watch)
        watch.add_store_exchange(lambda _: exchanged.set())
        watch.report_progress(7, "training")
        store.add(staging.STORE_KEY, 1)  # another rank's copy has grown
        assert exchanged.wait(30)
        assert "since step 7 (copying data to a node)" in watch._describe_hang(60)


SLOW = """
import os, time
from hpc.packed import staging

def slow_copy(source, target):
    report = staging.on_progress
    staging.BLOCK_BYTES = os.path.getsize(source) // 47
    staging.on_progress = lambda: (time.sleep(0.25), GROWS and report and report())
    copy_file(source, target)
    staging.on_progress = report

copy_file, staging.copy_file = staging.copy_file, slow_copy
"""
WORDS = ["trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.precision=32-true", "data=packed"]
WORDS += ["callbacks.progress=null", "trainer.max_steps=1", "checkpoint.monitor=null", "+trainer.limit_val_batches=0"]
WORDS += ["+trainer.limit_test_batches=1", "data.global_batch_size=4", "data.stage=true", "model.network.in_channels=3"]
WORDS += ["callbacks.samples=null"]


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize(("grows", "code"), [(True, 0), (False, 86)])
def test_ranks_wait_for_a_copy_as_long_as_it_grows(grows, code, images, local, start, tmp_path):
    """Let the copy take longer than a rank may go without progress."""
    words = [*WORDS, f"data.file={images}", f"cluster.node_local={tmp_path}/local", "faults.hang_minutes=0.05"]
    said = start(tmp_path / "run", 2, words, patch=SLOW.replace("GROWS", str(grows)), code=code)
    assert grows or "Hang" in said
