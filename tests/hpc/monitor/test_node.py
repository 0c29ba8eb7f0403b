"""Check the sampler's process: its output, its dependencies, and when it ends."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork import ENVIRON, PROJECT

from hpc.monitor import sampler as monitor_sampler

# Stands in for a driver with two GPUs, the second of which falls off the bus when the file `lost` is there.
NVML = """
import importlib.util, os, sys
from types import SimpleNamespace

spec = importlib.util.spec_from_file_location("real", {real!r})
real = importlib.util.module_from_spec(spec)
sys.modules["real"] = real
spec.loader.exec_module(real)
globals().update(vars(real))

def figure(value):
    def answer(handle, *_):
        if handle == 1 and os.path.exists({lost!r}):
            raise real.NVMLError(real.NVML_ERROR_GPU_IS_LOST)
        return value
    return answer

nvmlInit, nvmlDeviceGetCount, nvmlDeviceGetHandleByIndex = lambda: None, lambda: 2, lambda index: index
nvmlDeviceGetUtilizationRates, nvmlDeviceGetPowerUsage = figure(SimpleNamespace(gpu=75)), figure(250000)
nvmlDeviceGetMemoryInfo, nvmlDeviceGetTemperature = figure(SimpleNamespace(used=2 * 10**9)), figure(50)
"""
# A rank: starts a sampler, and ends it when a line "end" arrives.
RANK = """
import os, sys, time
from pathlib import Path
from hpc.monitor import sampler as node
pipe = node.start_sampler(Path(sys.argv[1]), 1, every_seconds=float(sys.argv[2]), num_gpus=int(sys.argv[3]))
if sys.stdin.readline().strip() == "end":
    os.write(pipe, b"x")
    sys.stdin.readline()
"""

# Prints the modules that one sample imports.
IMPORTS = """
import json, sys
before = set(sys.modules)
from pathlib import Path
from hpc.monitor import sampler as node
node.NodeSampler(Path(sys.argv[1]), 1, 1).sample()
print(json.dumps(list(set(sys.modules) - before)))
"""


def until(condition: Callable[[], object], seconds: float = 30) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def table(run_dir: Path) -> list[dict[str, str]]:
    path = run_dir / "monitor" / f"{socket.gethostname()}.csv"
    if not path.exists():
        return []
    with path.open() as stream:
        return list(csv.DictReader(stream))


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def child(pid: int) -> int:
    """Return the only child of this process, if it is the sampler."""

    def children() -> list[str]:
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    until(children)
    until(lambda: b"hpc.monitor.sampler" in Path(f"/proc/{children()[0]}/cmdline").read_bytes())
    return int(children()[0])


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a rank whose sampler writes into tmp_path/run; the output of both goes to tmp_path/log."""
    ranks = []

    def begin(seconds: float = 0.05, gpus: int = 0, path: Path | None = None) -> subprocess.Popen[str]:
        source = os.pathsep.join(map(str, [PROJECT / "src", *([path] if path else [])]))
        command = [sys.executable, "-c", RANK, str(tmp_path / "run"), str(seconds), str(gpus)]
        with (tmp_path / "log").open("a") as log:
            environ = ENVIRON | {"PYTHONPATH": source}
            ranks.append(
                subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True)
            )
        return ranks[-1]

    yield begin
    for rank in ranks:
        rank.kill()
        rank.communicate()


def test_it_samples_until_a_byte_arrives(start: Start, tmp_path: Path) -> None:
    rank = start()
    sampler = child(rank.pid)
    until(lambda: len(table(tmp_path / "run")) > 2)
    assert rank.stdin
    rank.stdin.write("end\n")
    rank.stdin.flush()
    until(lambda: not lives(sampler))
    assert rank.poll() is None
    rows = table(tmp_path / "run")
    assert list(rows[0]) == monitor_sampler.COLUMNS and {row["attempt"] for row in rows} == {"1"}
    assert all(float(row["memory_gb"]) > 0 for row in rows)
    assert [float(row["time"]) for row in rows] == sorted(float(row["time"]) for row in rows)
    assert (tmp_path / "log").read_text() == ""


def test_a_run_that_is_shorter_than_an_interval_has_a_sample(start: Start, tmp_path: Path) -> None:
    rank = start(seconds=3600)
    sampler = child(rank.pid)
    assert rank.stdin
    rank.stdin.write("end\n")
    rank.stdin.flush()
    until(lambda: not lives(sampler))
    assert len(table(tmp_path / "run")) == 1


def test_it_ends_when_its_rank_is_killed(start: Start) -> None:
    rank = start(seconds=3600)
    sampler = child(rank.pid)
    rank.kill()  # SIGKILL
    until(lambda: not lives(sampler), seconds=5)


def test_it_ends_with_its_rank_even_if_the_driver_hangs(start: Start, tmp_path: Path) -> None:
    hangs = "import time\nfrom pathlib import Path\nNVMLError = OSError\n"
    hangs += f"def nvmlInit():\n    Path({str(tmp_path / 'asked')!r}).touch()\n    time.sleep(3600)\n"
    (tmp_path / "pynvml.py").write_text(hangs)
    rank = start(gpus=1, path=tmp_path)
    sampler = child(rank.pid)
    until((tmp_path / "asked").exists)
    rank.kill()
    until(lambda: not lives(sampler), seconds=5)


def test_no_warning_of_a_scheduler_ends_it(start: Start, tmp_path: Path) -> None:
    rank = start()
    sampler = child(rank.pid)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        os.kill(sampler, number)  # some of them before its first line of Python
    until(lambda: len(table(tmp_path / "run")) > 2)
    assert lives(sampler)


def test_it_has_the_lowest_priority_and_all_of_the_jobs_cores(start: Start) -> None:
    allowed = os.sched_getaffinity(0)
    rank = start()
    sampler = child(rank.pid)
    until(lambda: os.getpriority(os.PRIO_PROCESS, sampler) == 19)
    until(lambda: os.sched_getaffinity(sampler) >= allowed)
    assert os.sched_getaffinity(rank.pid) == allowed


def test_a_gpu_that_falls_off_the_bus_leaves_cells_empty_and_a_line_in_the_log(start: Start, tmp_path: Path) -> None:
    import pynvml

    lost = tmp_path / "lost"
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries/pynvml.py").write_text(NVML.format(real=pynvml.__file__, lost=str(lost)))
    start(gpus=3, path=tmp_path / "libraries")
    until(lambda: len(table(tmp_path / "run")) > 2)
    lost.touch()
    until(lambda: table(tmp_path / "run")[-1]["gpu1_watts"] == "")
    num_rows = len(table(tmp_path / "run"))
    until(lambda: len(table(tmp_path / "run")) > num_rows + 3)
    metrics = ("percent", "memory_gb", "watts", "celsius")
    first, last = table(tmp_path / "run")[0], table(tmp_path / "run")[-1]
    assert [float(first[f"gpu{gpu}_{name}"]) for gpu in (0, 1) for name in metrics] == [75, 2, 250, 50] * 2
    assert [float(last[f"gpu0_{name}"]) for name in metrics] == [75, 2, 250, 50]
    assert {last[f"gpu{gpu}_{name}"] for gpu in (1, 2) for name in metrics} == {""}
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "some GPUs are not sampled: only 2 of 3 can be read",
        "GPU 1: GPU is lost",
    ]


def test_without_a_driver_the_node_is_sampled_all_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sampler = monitor_sampler.NodeSampler(tmp_path, 1, 2)
    sampler.sample()
    sampler.sample()
    rows = table(tmp_path)
    assert len(rows) == 2 and rows[0]["memory_gb"] and {rows[0][f"gpu{gpu}_watts"] for gpu in (0, 1)} == {""}
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 1 and "the GPUs are not sampled" in lines[0]


def test_a_folder_that_cannot_be_written_costs_samples_and_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "monitor").touch()  # in the place of the folder
    sampler = monitor_sampler.NodeSampler(tmp_path, 1, 0)
    for _ in range(3):
        sampler.sample()
    (tmp_path / "monitor").unlink()
    sampler.sample()
    assert len(table(tmp_path)) == 1
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 1 and "samples are lost: cannot write " in lines[0]


def test_curves_continue_those_of_an_earlier_attempt(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    row = dict.fromkeys(("cpu_percent", "memory_gb"), 1.0)
    monitor_sampler.NodeSampler(tmp_path, 1, 0).write(1000, row)
    later = monitor_sampler.NodeSampler(tmp_path, 2, 0)
    later.write(5000.9, row)
    later.write(5010.9, row | {"cpu_percent": None})
    board = EventAccumulator(str(tmp_path / "tensorboard" / f"node-{later.host}"))
    board.Reload()
    assert [event.step for event in board.Scalars("node/cpu_percent")] == [0, 4000]
    assert [event.step for event in board.Scalars("node/memory_gb")] == [0, 4000, 4010]


def test_it_needs_neither_torch_nor_lightning_nor_numpy(tmp_path: Path) -> None:
    environ = ENVIRON | {"PYTHONPATH": str(PROJECT / "src")}
    command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    libraries = imported - sys.stdlib_module_names - {"hpc"}
    assert libraries <= {"google", "pynvml", "tensorboard"}
    assert len(table(tmp_path)) == 1


def test_a_sample_opens_only_files_of_the_kernel(tmp_path: Path) -> None:
    """Check that a sample opens nothing in the run directory, which lies on a shared file server."""
    sampler, opened = monitor_sampler.NodeSampler(tmp_path, 1, 0), []
    sampler.sample()
    watching = True

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "open":
            opened.append(str(arguments[0]))

    sys.addaudithook(note)
    sampler.sample()
    watching = False
    assert opened and not [path for path in opened if not path.startswith(("/proc/", "/sys/"))]
