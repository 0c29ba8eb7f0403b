"""Check the files of profile=true, and the shares of the time that it reports."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typed_fixes
from torch._C._autograd import DeviceType

from hpc.monitor.profile import Profile, covered_seconds, format_shares, split_events, time_shares

WORDS = ["trainer.accelerator=cpu", "trainer.max_steps=8", "+trainer.limit_test_batches=1", "callbacks.progress=null"]
SECOND = 1e6  # microseconds


def test_overlapping_intervals_count_once() -> None:
    assert covered_seconds([]) == 0
    assert covered_seconds([(0, SECOND), (2 * SECOND, 3 * SECOND), (0.5 * SECOND, SECOND)]) == 2
    assert covered_seconds([(0, 4 * SECOND), (SECOND, 2 * SECOND)]) == 4


def test_shares_of_the_time() -> None:
    """Check 10 seconds: kernels for 4, communication for 3 (one of them overlapped), waiting for data for 2."""
    kernels, communication = [(0, 4 * SECOND)], [(3 * SECOND, 6 * SECOND)]
    shares = time_shares(kernels, communication, total_seconds=10, waiting_seconds=2)
    expected = {"kernels": 0.4, "communication": 0.2, "data": 0.2, "host": 0.2, "hidden": 0.1}
    assert shares == pytest.approx(expected)
    output = "100.0 ms a step: kernels 40%, communication 20%, data 20%, host 20%; communication behind kernels 10%"
    assert format_shares(shares, 0.1) == output
    # Data loaded while kernels run cost no waiting time.
    assert time_shares([(0, 10 * SECOND)], [], total_seconds=10, waiting_seconds=5)["data"] == 0
    # If the wait was not measured, the remaining time may be waiting or anything else.
    unknown = time_shares(kernels, communication, total_seconds=10, waiting_seconds=None)
    assert format_shares(unknown, 0.1).endswith("communication 20%, host or data 40%; communication behind kernels 10%")


@pytest.mark.parametrize("steps_per_batch", [1, 2])
def test_the_recorded_steps_if_a_batch_makes_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_per_batch: int
) -> None:
    recorder, recorded = Profile(str(tmp_path), True, after=3, steps=3, ranks=[0]), []

    def begin(trainer: Any) -> None:
        recorder._recording_step, recorder._profiler = trainer.global_step, object()

    def end(trainer: Any) -> None:
        recorder._profiler = recorder._profiler and recorded.append((recorder._recording_step, trainer.global_step))

    monkeypatch.setattr(recorder, "_begin", begin)
    monkeypatch.setattr(recorder, "_end", end)
    for step in range(0, 20, steps_per_batch):
        trainer: Any = SimpleNamespace(global_step=step, global_rank=0, accumulate_grad_batches=1)
        for _ in range(3 - steps_per_batch):  # with manual optimization not every batch makes a step
            recorder.on_train_batch_start(trainer, None, None, 0)  # type: ignore[arg-type]
    assert recorded == [(3, 6)] if steps_per_batch == 1 else recorded == [(4, 8)]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_counts_as_communication(on_gpu: bool) -> None:
    def event(name: str, device: DeviceType, start: int) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=start + 1))

    events = [
        event("aten::mm", DeviceType.CPU, 0),
        event("gloo:all_reduce", DeviceType.CPU, 1),
        event("Optimizer.step", DeviceType.CPU, 2),
        event("sm90_gemm", DeviceType.CUDA, 3),
        event("ncclDevKernel_AllReduce", DeviceType.CUDA, 4),
    ]
    expected = ([(3, 4)], [(4, 5)]) if on_gpu else ([(0, 1)], [(1, 2)])
    assert split_events(events, on_gpu) == expected


@pytest.mark.slow
def test_a_few_steps_of_the_chosen_ranks_are_recorded(start: Callable, tmp_path: Path) -> None:
    words = ["strategy=ddp", "trainer.devices=2", "profile=true", "callbacks.profile.after=2"]
    output = start(tmp_path / "run", 2, [*WORDS, *words, "callbacks.profile.steps=3", "callbacks.profile.ranks=[1]"])
    assert "profile of steps 2-4, rank 1: " in output and "rank 0: " not in output
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == ["rank-1.json.gz", "rank-1.txt"]
    with gzip.open(folder / "rank-1.json.gz") as trace:
        names = {event.get("name", "") for event in json.load(trace)["traceEvents"]}
    assert {"gloo:all_reduce", "aten::convolution_backward"} <= names
    assert "aten::convolution_backward" in (folder / "rank-1.txt").read_text()


@pytest.mark.slow
def test_a_snapshot_of_memory_needs_a_gpu(start: Callable, tmp_path: Path) -> None:
    words = [*WORDS, "profile=true", "callbacks.profile.memory=true"]
    said = start(tmp_path / "run", 1, words, code=2)
    assert "ConfigError: callbacks.profile.memory=True" in said
    (typed,) = typed_fixes.retyped(words, typed_fixes.printed(said))
    start(tmp_path / "accepted", 1, typed)
