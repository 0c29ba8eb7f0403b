"""Check programs on a system that is not Linux, such as macOS: what only Linux has is removed before they start."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fork import ENVIRON, PROJECT, QUIET, scalars

from hpc.system import process

# Functions of Python's libraries that macOS does not have, and its lack of /proc and /sys. Of the standard library only
# asyncio and selectors ask for some of them, and they accept that.
NOT_LINUX = """
import builtins, ctypes, io, os, runpy, select, signal, sys, time
GONE = {
    os: "copy_file_range eventfd fdatasync getrandom memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate "
        "sched_getaffinity sched_setaffinity setresuid splice unshare getxattr setxattr listxattr",
    signal: "sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL pidfd_send_signal",
    select: "epoll",
    time: "CLOCK_BOOTTIME",
}
for module, names in GONE.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def hiding(function):
    def call(path, *rest, **named):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *rest, **named)
    return call

for module, names in {builtins: ["open"], io: ["open"], os: ["open", "stat", "listdir", "scandir", "readlink"]}.items():
    for name in names:
        setattr(module, name, hiding(getattr(module, name)))

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*words: str, code: int = 0) -> str:
    command = [sys.executable, "-c", NOT_LINUX, *words]
    done = subprocess.run(command, cwd=PROJECT, env=ENVIRON, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.mark.soak
def test_a_run_trains_and_resumes_without_linux(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["trainer.max_steps=30", "checkpoint.every_n_steps=10", "+data.num_workers=1", f"run_dir={run_dir}", QUIET]
    assert "test/accuracy" in run(f"{PROJECT}/train.py", *words)
    assert len(scalars(run_dir, "step/loss")) == 6  # of steps 1, 2, 5, 10, 20, 30
    run(f"{PROJECT}/train.py", f"resume={run_dir}", "trainer.max_steps=40", QUIET)
    assert len(scalars(run_dir, "step/loss")) == 7
    assert "finished" in run(f"{PROJECT}/report.py", str(run_dir))


@pytest.mark.soak
def test_checks_and_plans_work_without_linux(tmp_path: Path) -> None:
    assert "trainer.devices must be at least 1" in run(f"{PROJECT}/train.py", "trainer.devices=0", code=2)
    assert "memory of a" in run(f"{PROJECT}/plan.py")
    assert "#SBATCH" in run(f"{PROJECT}/submit.py", "cluster=slurm", "trainer=ddp", "--dry-run")


def test_the_number_of_cores_is_that_of_the_machine_where_the_system_knows_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert process.num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert process.num_cores() == os.cpu_count()


@pytest.mark.parametrize("knows_sender", [True, False])
def test_a_worker_waits_for_the_signal_of_its_rank(knows_sender: bool, tmp_path: Path) -> None:
    code = """
import json, os, signal, sys
from hpc.system import process
signals = [signal.SIGTERM, signal.SIGUSR1]
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print(os.getpid(), flush=True)
if not json.loads(sys.argv[1]):
    del signal.sigwaitinfo
process.wait_for_signal(signal.SIGTERM, sender=os.getppid(), blocked=signals)
print("ended", flush=True)
"""
    command = [sys.executable, "-c", code, json.dumps(knows_sender)]
    with subprocess.Popen(command, env=ENVIRON | {"PYTHONPATH": f"{PROJECT}/src"}, stdout=subprocess.PIPE) as worker:
        assert worker.stdout
        pid = int(worker.stdout.readline())
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGTERM)
        assert worker.stdout.readline() == b"ended\n"
    assert worker.returncode == 0
