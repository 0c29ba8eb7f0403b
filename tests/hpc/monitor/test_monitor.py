"""Check monitored runs: one sampler per node, the recorded phases, and no processes left behind."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from test_curves import fitted
from test_node import samples

from hpc.config.errors import ConfigError
from hpc.monitor.monitor import Monitor
from hpc.run import attempt_log

WORDS = [
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "callbacks.progress=null",
    "+trainer.enable_progress_bar=false",
    "callbacks.monitor.every_seconds=1",
    "data.global_batch_size=128",
    "trainer.max_epochs=2",
    "+trainer.limit_test_batches=1",
]
# Delay each start after a few steps until its sampler has written a sample.
SAMPLED = """
import time
from hpc.resume.resume import Resume

def on_train_batch_start(self, trainer, module, batch, batch_idx):
    before(self, trainer, module, batch, batch_idx)
    limit = time.monotonic() + 60
    while trainer.local_rank == 0 and batch_idx % 9 == 5 and not sampled(self):
        assert time.monotonic() < limit
        time.sleep(0.02)

def sampled(self):
    lines = [line for file in self.run.run_dir.glob("monitor/node-*.jsonl") for line in file.read_text().splitlines()]
    return any(f'"attempt": {self.run.number},' in line for line in lines)

before, Resume.on_train_batch_start = Resume.on_train_batch_start, on_train_batch_start
"""


def test_the_first_step_may_be_the_whole_epoch(tmp_path: Path) -> None:
    """Check an epoch with fewer batches than one step accumulates: it has a single step."""
    monitor = Monitor(str(tmp_path), 1)
    monitor.attempt = 1  # without a sampler
    (tmp_path / "monitor").mkdir()
    fitted(tmp_path, [1.0, 2.0], callbacks=[monitor], accumulate_grad_batches=3, max_epochs=2)
    assert [note["step"] for note in noted(tmp_path) if note["what"] == "start"] == [1]


def test_a_validation_begins_before_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, times = Monitor(str(tmp_path), 1), []

    class Watched(torch.utils.data.DataLoader):
        def __iter__(self) -> Any:
            times.append(time.time())
            while time.time() < times[-1] + 0.01:  # phases are noted in milliseconds
                pass
            return super().__iter__()

    module = BoringModel()
    module.val_dataloader = lambda: Watched(RandomDataset(32, 4))  # type: ignore[method-assign]
    trainer = L.Trainer(
        accelerator="cpu", callbacks=[monitor], max_epochs=2, limit_train_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    begins = [note["begin"] for note in noted(tmp_path) if note["what"] == "validation"]
    assert len(begins) == 2 and all(begin <= made + 0.001 for begin, made in zip(begins, times[1:], strict=True))


def noted(run_dir: Path) -> list[dict]:
    lines = (run_dir / "monitor" / "phases.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.soak
@pytest.mark.slow
def test_two_ranks_of_a_node_stopped_and_gone_on(start: Callable, tmp_path: Path) -> None:
    run_dir, host = tmp_path / "run", socket.gethostname()
    start(run_dir, 2, ["trainer=ddp", "trainer.devices=2", *WORDS], stop_at=6, patch=SAMPLED)
    first, curves = noted(run_dir), list(run_dir.glob("tensorboard/node-*/events*"))
    sizes = {file: file.stat().st_size for file in curves}
    assert [phase["what"] for phase in first] == ["start", "checkpoint"] and len(curves) == 1
    start(run_dir, 2, [], patch=SAMPLED)
    assert [path.name for path in (run_dir / "monitor").glob("node-*")] == [f"node-{host}.jsonl"]
    assert {row["attempt"] for row in samples(run_dir)} == {1, 2}
    assert {file: file.stat().st_size for file in curves} == sizes  # a checkpoint without their sizes truncates none
    assert len(list(run_dir.glob("tensorboard/node-*/events*"))) == 2
    later = noted(run_dir)[len(first) :]
    whats = [phase["what"] for phase in later]
    assert {phase["attempt"] for phase in later} == {2} and whats[0] == "start" and whats[-1] == "test"
    assert [whats.count(what) for what in ("start", "epoch", "validation", "test")] == [1, 2, 2, 1]
    assert "checkpoint" in whats and all(phase["begin"] <= phase["end"] for phase in noted(run_dir))
    ends = [event for event in attempt_log.read_events(run_dir) if event["event"] == "end"]
    assert "validated" not in ends[0] and "val/loss" in ends[1]["validated"], "for a table of many runs"
    assert [phase["step"] for phase in first] == [1, 6] and later[-1]["step"] == later[-2]["step"]


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_its_samples_and_phases(start: Callable, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    killed = "import os, signal; Resume.on_validation_start = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    words = ["trainer=cpu", *WORDS, "+trainer.num_sanity_val_steps=0"]
    start(run_dir, 1, words, patch=f"{SAMPLED}\n{killed}", code=[-signal.SIGKILL])
    assert samples(run_dir) and [phase["what"] for phase in noted(run_dir)][:1] == ["start"]


@pytest.mark.slow
def test_a_run_without_monitor_has_no_samples(start: Callable, tmp_path: Path) -> None:
    words = [word for word in WORDS if "monitor" not in word]
    start(tmp_path / "run", 1, ["trainer=cpu", *words, "callbacks.monitor=null", "trainer.max_steps=1"])
    assert not (tmp_path / "run/monitor").exists() and not list(tmp_path.glob("run/tensorboard/node-*"))


def test_the_sampler_ends_when_the_run_ends_or_fails_but_not_between_fit_and_test() -> None:
    nobody: Any = None
    for end in (
        lambda m: m.teardown(nobody, nobody, "test"),
        lambda m: m.teardown(nobody, nobody, "predict"),
        lambda m: m.on_exception(nobody, nobody, nobody),
    ):
        monitor, stops = Monitor("run", 10), []
        monitor._sampler = SimpleNamespace(stop=lambda stops=stops: stops.append(1))  # type: ignore[assignment]
        monitor.teardown(nobody, nobody, "fit")
        assert not stops
        end(monitor)
        end(monitor)  # a second end does nothing
        assert len(stops) == 1


def test_a_phase_is_a_line_and_is_lost_if_it_cannot_be_written(tmp_path: Path) -> None:
    attempt_log.record_phase(tmp_path, 1, name="epoch", begin_time=0, step=1)  # no folder: writes nothing
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "monitor").mkdir()
    file = tmp_path / "monitor" / "phases.jsonl"
    file.write_text('{"what": "st')  # a crash cut it off
    before = time.time()
    attempt_log.record_phase(tmp_path, 3, name="validation", begin_time=before - 5, step=70)
    line = json.loads(file.read_text().splitlines()[1])
    assert line["end"] - line["begin"] >= 5 and abs(line["end"] - before) < 60
    assert {key: line[key] for key in ("what", "attempt", "step")} == {"what": "validation", "attempt": 3, "step": 70}


@pytest.mark.parametrize("seconds", ["0", "0.5", "-1", ".inf", ".nan", "often"])
def test_every_seconds_must_be_a_number_of_seconds(seconds: str) -> None:
    from hpc.config import arguments, compose, parse

    cfg = compose.compose_overrides([f"callbacks.monitor.every_seconds={seconds}"])
    with pytest.raises(ConfigError, match=r"callbacks\.monitor\.every_seconds"):
        arguments.check_files(parse.parse(cfg))


def test_a_process_knows_when_it_started() -> None:
    from hpc.system import process

    reads, writes = os.pipe()
    before = time.time()
    if not (pid := os.fork()):
        os.write(writes, f"{process.start_unix_time()}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert before - 0.5 <= float(os.read(reads, 100)) <= time.time() + 0.5
