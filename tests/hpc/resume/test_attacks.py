"""Check that `train.py resume=` rejects missing, finished and malicious runs in a few words and executes nothing."""

import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hpc.checkpoint import on_disk
from hpc.config.errors import ExitCode
from hpc.run import claim

pytestmark = pytest.mark.slow

WORDS = [
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.max_steps=3",
    "trainer.devices=1",
    "+trainer.limit_val_batches=0",
    "+trainer.limit_test_batches=1",
    "checkpoint.monitor=null",
    "callbacks.progress=null",
]


@pytest.fixture(scope="module")
def stopped(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind of checkpoint, stopped after two steps."""
    runs = {name: tmp_path_factory.mktemp("runs") / name for name in ("ddp", "deepspeed_zero2")}
    for name, run_dir in runs.items():
        start(run_dir, 1, [*WORDS, f"strategy={name}"], 2)
    return runs


@pytest.fixture
def resume(start: Callable, stopped: dict[str, Path], tmp_path: Path) -> Callable[..., str]:
    """Apply `change` to a copy of the run and return the error message of its rejection."""

    def rejected(change: Callable[[Path], object], strategy: str = "ddp") -> str:
        run_dir = tmp_path / "run"
        shutil.copytree(stopped[strategy], run_dir, symlinks=True)
        change(run_dir)
        said = start(run_dir, 1, [], code=2)
        _, _, words = said.partition("ConfigError: ")
        assert words.count("\n") <= 4 and "Traceback" not in said, said
        return words

    return rejected


def last(run_dir: Path) -> Path:
    return (run_dir / "checkpoints" / "last.ckpt").resolve()


def test_a_run_of_another_model(resume: Callable) -> None:
    def change(run_dir: Path) -> None:
        config, words = run_dir / "config.yaml", run_dir / "overrides.json"
        config.write_text(config.read_text().replace("- 16\n", "- 24\n"))
        words.write_text(json.dumps([*json.loads(words.read_text()), "model.network.widths=[24,32,64]"]))

    assert "network.stem.0.weight (16, 1, 3, 3) instead of (24, 1, 3, 3)" in resume(change)


@pytest.mark.parametrize(
    ("version", "rule"), [(99, "newer version"), (1, "the version that wrote its checkpoint")], ids=["newer", "older"]
)
def test_a_run_of_another_version(version: int, rule: str, resume: Callable) -> None:
    def change(run_dir: Path) -> None:
        path = last(run_dir) / on_disk.MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))

    assert rule in resume(change)


@pytest.mark.parametrize("gone", ["meta.pt", ".metadata", "__0_0.distcp", on_disk.MANIFEST, "."])
def test_a_run_that_is_half_deleted(gone: str, resume: Callable) -> None:
    def change(run_dir: Path) -> None:
        path = last(run_dir) / gone
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    assert "none of its checkpoints is whole" in resume(change)


def test_a_run_that_is_finished(start: Callable, stopped: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(stopped["ddp"], tmp_path / "run", symlinks=True)
    start(tmp_path / "run", 1, [])
    assert "The run is finished" in start(tmp_path / "run", 1, [], code=2)


def test_a_run_that_is_running(resume: Callable) -> None:
    held = []
    said = resume(lambda run_dir: held.append(claim.take_claim(run_dir, {"job": "17", "host": "node3", "pid": 1})))
    assert "17" in said and "node3" in said
    held[0].release()


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Return a function that mounts a folder read-only: file modes do not stop root."""
    mounted: list[Path] = []

    def mount(path: Path) -> None:
        for options in (["--bind"], ["-o", "remount,bind,ro"]):
            if subprocess.run(["mount", *options, path, path], capture_output=True).returncode:
                pytest.skip("cannot mount")
            mounted.append(path)

    yield mount
    for path in mounted[:1]:
        subprocess.run(["umount", path], check=True)


def test_a_run_that_is_read_only(resume: Callable, read_only: Callable[[Path], None]) -> None:
    assert "Read-only file system" in resume(read_only)


class Bomb:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.canary),)


def vouch(folder: Path) -> None:
    """Correct sizes and checksums, as an attacker would."""
    manifest = json.loads((folder / on_disk.MANIFEST).read_text())
    manifest["files"] = on_disk.checksums(folder, on_disk.file_names(folder))
    (folder / on_disk.MANIFEST).write_text(json.dumps(manifest))


TRAPS = {
    "ddp": ["meta.pt", "rank-0.pt", ".metadata", "__0_0.distcp"],
    "deepspeed_zero2": [
        "meta.pt",
        "checkpoint/mp_rank_00_model_states.pt",
        "checkpoint/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
}


@pytest.mark.parametrize(("strategy", "name"), [(key, name) for key, names in TRAPS.items() for name in names])
def test_nothing_in_a_checkpoint_is_executed(strategy: str, name: str, resume: Callable, tmp_path: Path) -> None:
    def change(run_dir: Path) -> None:
        folder = last(run_dir)
        if name == ".metadata":
            (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
        elif name.endswith(".distcp"):
            torch.save(Bomb(tmp_path / "canary"), folder / name)
            metadata = pickle.loads((folder / ".metadata").read_bytes())
            for place in metadata.storage_data.values():
                place.offset, place.length = 0, (folder / name).stat().st_size
            (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        else:
            torch.save({"module": Bomb(tmp_path / "canary")}, folder / name)
        vouch(folder)

    said = resume(change, strategy)
    assert not (tmp_path / "canary").exists()
    assert "posix.mkdir" in said and "nothing in it is executed" in said


def test_a_trap_that_another_rank_finds(start: Callable, tmp_path: Path) -> None:
    """Check a malicious file that only rank 1 reads.

    Rank 1 reports the error, all ranks end, and no job restarts the run.
    """
    run_dir = tmp_path / "run"
    start(run_dir, 2, [*WORDS, "trainer.devices=2", "strategy=ddp"], 2)
    folder = last(run_dir)
    torch.save(Bomb(tmp_path / "canary"), folder / "rank-1.pt")
    vouch(folder)
    said = start(run_dir, 2, [], code=[ExitCode.ANOTHER_RANK_FAILED, 2])
    assert not (tmp_path / "canary").exists()
    assert said.count("\nConfigError: ") == 1 and "rank-1.pt" in said and "posix.mkdir" in said
    assert "outcome failed" in (run_dir / "verdict").read_text()
