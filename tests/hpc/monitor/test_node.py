"""Check the sampler of a node: what it writes, when it ends, and that no error or hang of it reaches the run."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork import ENVIRON, PROJECT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from hpc.monitor import counters, gpus, node_usage
from hpc.monitor import sampler as monitor_sampler
from hpc.monitor.sampler import NodeSampler

# A rank: starts a sampler that takes its first sample in an hour, or at the end.
RANK = """
import os, sys, threading, time
from pathlib import Path
from hpc.monitor import counters, gpus
from hpc.monitor.sampler import NodeSampler
sampler = NodeSampler(Path(sys.argv[1]), 1, every_seconds=3600, num_gpus=0)
"""


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def samples(run_dir: Path) -> list[dict[str, Any]]:
    path = node_usage.samples_file(run_dir, socket.gethostname())
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def points(run_dir: Path, name: str) -> list[tuple[int, float]]:
    """Return step and value of what TensorBoard shows of this node."""
    board = EventAccumulator(str(run_dir / "tensorboard" / f"node-{socket.gethostname()}"))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars(f"node/{name}")]


def make_sampler(run_dir: Path, attempt: int = 1, every_seconds: float = 0.05, num_gpus: int = 0) -> NodeSampler:
    return NodeSampler(run_dir, attempt, every_seconds=every_seconds, num_gpus=num_gpus)


def run_rank(run_dir: Path, program: str, *, code: int = 0) -> str:
    """Run a rank to its end; return its output."""
    command = [sys.executable, "-c", RANK + program, str(run_dir)]
    environ = ENVIRON | {"PYTHONPATH": str(PROJECT / "src")}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)
    assert done.returncode == code, done.stdout
    return done.stdout


def test_it_samples_until_it_is_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sampler = make_sampler(tmp_path)
    sampler.start()
    until(lambda: len(samples(tmp_path)) > 2)
    sampler.stop()
    until(lambda: "sampler" not in {thread.name for thread in threading.enumerate()})
    rows = samples(tmp_path)
    columns = ["time", "attempt", "cpu_percent", "net_in_mbs", "net_out_mbs", "disk_read_mbs", "disk_write_mbs"]
    assert list(rows[0]) == [*columns, "memory_gb"] and {row["attempt"] for row in rows} == {1}
    assert all(row["memory_gb"] > 0 for row in rows)
    assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
    assert [value for _, value in points(tmp_path, "memory_gb")] == pytest.approx([row["memory_gb"] for row in rows])
    (node,), notes = node_usage.read_nodes(tmp_path)
    assert list(node.columns["memory_gb"]) == [row["memory_gb"] for row in rows] and not notes
    assert capfd.readouterr() == ("", "")


def test_a_run_that_is_shorter_than_an_interval_has_a_sample(tmp_path: Path) -> None:
    sampler = make_sampler(tmp_path, every_seconds=3600)
    sampler.start()
    sampler.stop()
    sampler.stop()  # a second stop does nothing
    until(lambda: not sampler._thread.is_alive())
    assert len(samples(tmp_path)) == len(points(tmp_path, "memory_gb")) == 1


@pytest.mark.slow
def test_an_interpreter_that_ends_without_stopping_it_has_a_last_sample_and_its_own_exit_code(tmp_path: Path) -> None:
    assert run_rank(tmp_path, "sampler.start()\nsys.exit(3)", code=3) == ""
    assert len(samples(tmp_path)) == 1


HANGS = """
asked = threading.Event()
def hang(*_):
    asked.set()
    time.sleep(3600)
sampler._every_seconds = 0
gpus.read_gpus = hang
sampler.start()
asked.wait()
begin = time.monotonic()
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["sampler.stop()\nprint(time.monotonic() - begin)", "print(0)"])
def test_a_driver_that_hangs_holds_up_no_run_and_no_interpreter(end: str, tmp_path: Path) -> None:
    begin = time.monotonic()
    assert float(run_rank(tmp_path, HANGS + end)) < monitor_sampler.MAX_STOP_SECONDS + 10
    assert time.monotonic() - begin < 90


@pytest.mark.slow
def test_a_forked_process_ends_and_writes_nothing(tmp_path: Path) -> None:
    """Check a child that leaves through Python's own exit, as none of torch's workers does."""
    program = """
sampler.start()
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sampler.stop()
sys.exit(7)
"""
    run_rank(tmp_path, program, code=7)
    assert len(samples(tmp_path)) == len(points(tmp_path, "memory_gb")) == 1, "the parent's last one"


@pytest.mark.slow
def test_the_thread_imports_nothing(tmp_path: Path) -> None:
    """Check that no process can be forked while the thread holds a module's lock."""
    program = """
imported = []
sys.addaudithook(lambda event, words: imported.append(words[0]) if event == "import" else None)
sampler.sample()
print(imported)
"""
    assert run_rank(tmp_path, program) == "[]\n"


def test_whatever_a_library_raises_is_printed_once_and_sampling_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def fail(num_gpus: int) -> Any:
        calls.append(num_gpus)
        if len(calls) < 4:
            raise ZeroDivisionError("of a library")
        return {}, {}

    monkeypatch.setattr(gpus, "read_gpus", fail)
    sampler = make_sampler(tmp_path)
    sampler.start()
    until(lambda: samples(tmp_path))
    sampler.stop()
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"monitor of {sampler.host}: samples are lost: ZeroDivisionError: of a library"]


def test_a_limit_of_threads_costs_the_samples_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sampler = make_sampler(tmp_path)

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sampler._thread, "start", fail)
    sampler.start()
    sampler.stop()
    assert "the node is not sampled: can't start new thread" in capfd.readouterr().out


def test_figures_that_cannot_be_read_are_unknown_and_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    errors: dict[str, list[str]] = {"no power": ["gpu0_watts"]}

    def read(num_gpus: int) -> Any:
        figures = {f"gpu{index}_{metric}": 1.0 for index in range(num_gpus) for metric in gpus.READERS}
        return figures | {name: None for names in errors.values() for name in names}, errors

    monkeypatch.setattr(gpus, "read_gpus", read)
    sampler = make_sampler(tmp_path, num_gpus=2)
    sampler.sample()
    sampler.sample()
    errors["lost"] = ["gpu1_watts", "gpu1_percent"]
    sampler.sample()
    rows = samples(tmp_path)
    assert [row["gpu0_watts"] for row in rows] == [None] * 3 and [row["gpu1_percent"] for row in rows] == [1, 1, None]
    assert [value for _, value in points(tmp_path, "gpu1_percent")] == [1, 1]
    (node,), _ = node_usage.read_nodes(tmp_path)
    assert [len(node.gpu_columns(metric)) for metric in gpus.READERS] == [2] * 4 and node.num_gpus_with_power() == 1
    lines = [line.partition(": ")[2] for line in capfd.readouterr().out.splitlines()]
    assert lines == ["gpu0_watts cannot be read: no power", "gpu1_watts, gpu1_percent cannot be read: lost"]


def test_a_folder_that_cannot_be_written_costs_samples_and_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "monitor").touch()  # in the place of the folder
    (tmp_path / "tensorboard").touch()
    sampler = make_sampler(tmp_path)
    sampler.start()
    until(lambda: "samples are lost: FileExistsError" in capfd.readouterr().out)
    (tmp_path / "monitor").unlink()
    (tmp_path / "tensorboard").unlink()
    num_before = len(samples(tmp_path))
    until(lambda: len(samples(tmp_path)) > num_before + 2)
    sampler.stop()
    assert "lost" not in capfd.readouterr().out
    until(lambda: len(points(tmp_path, "memory_gb")) >= len(samples(tmp_path)) - 1)


def test_after_a_full_disk_curves_go_on_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make_sampler(tmp_path)
    sampler.write(1000.0, {"memory_gb": 1})
    assert sampler._curves

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sampler._curves, "add_event", fail)
        with pytest.raises(OSError):
            sampler.write(1001.0, {"memory_gb": 2})
    sampler.write(1002.0, {"memory_gb": 3})
    assert points(tmp_path, "memory_gb") == [(0, 1), (2, 3)]
    assert len(list((tmp_path / "tensorboard").rglob("events*"))) == 2, "the writer is of no use after an error"
    assert [row["memory_gb"] for row in samples(tmp_path)] == [1, 2, 3]


def test_curves_continue_those_of_an_earlier_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both files are of one second and one process. Their names end with a number, and 10 would sort before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    make_sampler(tmp_path).write(1000, {"cpu_percent": 1.0, "memory_gb": 1.0})
    later = make_sampler(tmp_path, attempt=2)
    later.write(5000.9, {"cpu_percent": 2.0, "memory_gb": 1.0})
    later.write(5010.9, {"cpu_percent": None, "memory_gb": 1.0})
    assert points(tmp_path, "cpu_percent") == [(0, 1), (4000, 2)]
    assert points(tmp_path, "memory_gb") == [(0, 1), (4000, 1), (4010, 1)]


def test_a_start_with_other_gpus_leaves_those_of_the_other_unknown(tmp_path: Path) -> None:
    for attempt, values in enumerate([{"gpu0_watts": 1.0}, {}, {"gpu0_watts": 3.0, "gpu1_watts": 4.0}], 1):
        make_sampler(tmp_path, attempt).write(1000.0 * attempt, values)
    (node,), notes = node_usage.read_nodes(tmp_path)
    first, second = ([value if value == value else None for value in column] for column in node.gpu_columns("watts"))
    assert (first, second, notes) == ([1, None, 3], [None, None, 4], [])
    assert list(node.columns["attempt"]) == [1, 2, 3] and list(node.times) == [1000, 2000, 3000]


def test_a_rate_is_that_since_the_sample_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = iter([0.0, 1e9, 3e9])
    names = ("busy", "idle", "net_in_mbs", "net_out_mbs", "disk_read_mbs", "disk_write_mbs")
    monkeypatch.setattr(
        counters, "read_counters", lambda cores: {name: {} for name in names} | {"net_out_mbs": {"eth0": next(sent)}}
    )
    clock = iter([10.0, 11.0, 15.0])
    monkeypatch.setattr(monitor_sampler, "time", Clock(clock))
    sampler = make_sampler(tmp_path)
    sampler.sample()
    sampler.sample()
    assert [row["net_out_mbs"] for row in samples(tmp_path)] == [1000, 500]


class Clock:
    def __init__(self, times: Any) -> None:
        self.times = times

    def monotonic(self) -> float:
        return next(self.times)

    def time(self) -> float:
        return time.time()


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"{}",
        b'"time"',
        b"null",
        b'{"time": 1, "attempt": 1, "cpu_percent": "x"}',
        b'{"time": 1, "attempt": 1, "cpu_percent": [1]}',
        b'{"time": NaN, "attempt": 1}',
        b'{"time": 1, "attempt": 1, "memory_gb": 1e300}',
        b'{"time": null, "attempt": 1}',
        b'{"attempt": 1}',
        b'{"time": 1, "attempt": 1, "memory',
        b"\xff\x00",
    ],
)
def test_a_damaged_line_is_left_out_and_counted(line: bytes, tmp_path: Path) -> None:
    file = node_usage.samples_file(tmp_path, "n1")
    file.parent.mkdir()
    whole = [b'{"time": 1, "attempt": 1, "memory_gb": 5}', b'{"time": 2, "attempt": 1, "other": 5, "memory_gb": null}']
    file.write_bytes(b"\n".join([whole[0], line, whole[1], b""]))
    (node,), notes = node_usage.read_nodes(tmp_path)
    assert list(node.times) == [1, 2] and list(node.columns) == ["time", "attempt", "memory_gb"]
    assert node.columns["memory_gb"][0] == 5 and node.columns["memory_gb"][1] != node.columns["memory_gb"][1]
    assert notes == ["node-n1.jsonl: 1 damaged line(s) left out"] and node.host == "n1"
    assert node_usage.first_sample_time(file) == 1


def test_no_first_time_without_a_sample(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    assert node_usage.first_sample_time(file) is None
    file.write_text('{"ti')
    assert node_usage.first_sample_time(file) is None
    os.unlink(file)
    os.mkfifo(file)
    assert node_usage.first_sample_time(file) is None, "a pipe is not waited for"
