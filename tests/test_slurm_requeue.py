"""What a job script does when its ranks end, or it is told to, on a real Slurm. The ranks are stand-ins without torch."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_nodes import ENDED, Slurm
from slurm_project import wait_for

pytestmark = pytest.mark.slow

# Does what the line of `plan` says that belongs to this start, the last one from then on:
# save / exit CODE / verdict WORD / wait (until told; then saves, verdict continue, 85) / hang (hears nothing)
RANK = '''\
import os, signal, sys, time
from pathlib import Path
run_dir, rank = Path(sys.argv[1].removeprefix("resume=")), os.environ["SLURM_PROCID"]
told = []
for name in ("SIGTERM", "SIGUSR2"):
    signal.signal(getattr(signal, name), lambda number, _: told.append(number))
start = int(os.environ.get("SLURM_RESTART_COUNT", 0))
if rank == "0":
    with open(run_dir / "starts", "a") as file:
        print(start, os.environ.get("HPC_JOB_END"), int(time.time()), file=file)

def save():
    if rank == "0":
        folder = run_dir / "checkpoints"
        (folder / f"step-{sum(1 for _ in folder.glob('*')) + 1:09}").mkdir(parents=True)

def verdict(word):
    if rank == "0":
        (run_dir / "verdict").write_text(f"attempt {start + 1}\\nstep 1\\noutcome {word}\\nwhy test\\n")

plan = (run_dir / "plan").read_text().splitlines()
for command in plan[min(start, len(plan) - 1)].split(", "):
    word, _, value = command.partition(" ")
    (run_dir / f"{word}-{rank}-{start}").touch()
    while word == "hang" or word == "wait" and not told:
        time.sleep(0.05)
    if word in ("save", "wait"):
        time.sleep(1 if word == "wait" else 0)
        save()
    if word in ("verdict", "wait"):
        verdict(value or "continue")
    if word in ("exit", "wait"):
        sys.exit(int(value or 85))
'''
# Makes job.sh as submit.py does, in a baked project.
WRITE = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, "src")
from my_research.hpc import commandline, job, slurm
root = Path(sys.argv[1])
cfg = commandline.compose_overrides(["cluster=slurm", "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1"])
places = {"run_dir": root / "RUN", "code": root / "RUN/code", "work_dir": root, "venv": None}
work = replace(job.of(cfg, **places), cores_per_task=1, memory_gb=1, whole_nodes=False, partition=None, request=None)
(root / "job.sh").write_text(slurm.text(work))
array = replace(work, run_dir=None, members=root / "members", num_members=2)
(root / "array.sh").write_text(slurm.text(array))
"""


@dataclass
class Run:
    """A run directory and its job."""

    slurm: Slurm
    run_dir: Path
    job: str = ""

    def submit(self) -> None:
        self.job = self.slurm.sbatch(self.run_dir / "job.sh")

    def at(self, what: str, start: int = 0) -> "Run":
        """Wait until both ranks are there."""
        files = [self.run_dir / f"{what}-{rank}-{start}" for rank in (0, 1)]
        wait_for(lambda: all(file.exists() for file in files), 40, f"{files}\n{self.log()}")
        return self

    def ended(self, seconds: float = 60) -> str:
        return self.slurm.wait(self.job, seconds)["JobState"]

    def starts(self) -> list[int]:
        return [int(line.split()[0]) for line in (self.run_dir / "starts").read_text().splitlines()]

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.run_dir.glob("job-*.log"))


@pytest.fixture(scope="module")
def scripts(project, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("requeue")
    done = subprocess.run([sys.executable, "-c", WRITE, root], cwd=project, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def make(slurm, scripts) -> Callable[[str, str], Run]:
    """make(name, plan): a run, not submitted yet."""

    def make(name: str, *plan: str) -> Run:
        run_dir = scripts / name
        (run_dir / "code").mkdir(parents=True)
        (run_dir / "code" / "env.sh").write_text(f"python() {{ :; }}; PATH={Path(sys.executable).parent}:$PATH\n")
        (run_dir / "code" / "train.py").write_text(RANK)
        (run_dir / "plan").write_text("\n".join(plan) + "\n")
        (run_dir / "job.sh").write_text((scripts / "job.sh").read_text().replace("/RUN", f"/{name}"))
        return Run(slurm, run_dir)

    return make


def seen(run: Run, until: Callable[[], bool], seconds: float = 60) -> set[str]:
    """The states that an observer sees meanwhile."""
    states, limit = set(), time.monotonic() + seconds
    while not until():
        assert time.monotonic() < limit, run.log()
        states.add(run.slurm.show(run.job)["JobState"])
    return states


FINISH = "save, verdict finished"


def test_ranks_that_end_by_themselves(make):
    """Requeued after a verdict to go on and after a crash; not after a refusal, nor for ever; done when finished."""
    runs = {
        "continues": make("continues", "save, verdict continue, exit 85", FINISH),
        "crashes": make("crashes", "save, exit 1", "exit 1", "exit 1", "save, exit 1", "exit 1", FINISH),
        "loops": make("loops", "save, exit 1", "exit 1"),
        "refuses": make("refuses", "exit 2"),
        "gives up": make("gives up", "verdict failed, exit 1"),
        "leaves": make("leaves", "exit 0", FINISH),
    }
    for run in runs.values():
        run.submit()
    first = runs["continues"]
    states = seen(first, lambda: (first.run_dir / "verdict-0-1").exists())
    assert "RUNNING" in states and not states & ENDED, states
    assert first.ended() == "COMPLETED" and first.starts() == [0, 1]
    assert runs["refuses"].ended() == "FAILED" and runs["refuses"].starts() == [0]
    assert "refused" in runs["refuses"].log() and runs["refuses"].slurm.show(runs["refuses"].job)["ExitCode"] == "2:0"
    assert runs["gives up"].ended() == "FAILED" and runs["gives up"].starts() == [0]
    assert runs["leaves"].ended() == "COMPLETED" and runs["leaves"].starts() == [0, 1]
    assert runs["loops"].ended() == "FAILED" and runs["loops"].starts() == [0, 1, 2, 3]
    assert "3 starts in a row brought no newer checkpoint" in runs["loops"].log()
    assert f"sbatch '{runs['loops'].run_dir}/job.sh'" in runs["loops"].log()
    assert runs["crashes"].ended(90) == "COMPLETED" and runs["crashes"].starts() == [0, 1, 2, 3, 4, 5]

    for run in (first, runs["loops"], runs["gives up"]):  # by hand again
        (run.run_dir / "plan").write_text(FINISH)
        run.submit()
    assert first.ended() == "COMPLETED" and first.starts() == [0, 1] and "finished already" in first.log()
    assert runs["loops"].ended() == runs["gives up"].ended() == "COMPLETED"


def test_ranks_that_are_told(make):
    """By signals from outside: all save; who was cancelled does not come back, the others do, once."""
    cancelled, signalled, requeued, limited, hung = (
        make(name, plan, FINISH)
        for name, plan in {"cancel": "wait", "TERM": "wait", "admin": "wait", "limit": "wait", "hang": "hang"}.items()
    )
    runs = (cancelled, signalled, requeued, limited, hung)
    for run in runs:
        run.submit()
    for run in runs:
        run.at("hang" if run is hung else "wait")
    slurm = cancelled.slurm
    for run in (limited, hung):
        slurm.call("scontrol", "update", f"job={run.job}", "EndTime=now+1")
    slurm.cancel(cancelled.job)
    slurm.cancel("--signal=TERM", signalled.job)
    slurm.call("scontrol", "requeue", requeued.job)
    assert cancelled.ended() == "CANCELLED"
    for run in (signalled, requeued, limited, hung):
        assert run.ended() == "COMPLETED", run.log()
        assert run.starts() == [0, 1] and slurm.show(run.job)["Restarts"] == "1", run.log()
    for run in (cancelled, signalled, requeued, limited):
        assert (run.run_dir / "checkpoints" / "step-000000001").is_dir(), run.log()
    assert slurm.show(cancelled.job)["JobState"] == "CANCELLED" and cancelled.starts() == [0]
    for run in runs:
        for line in (run.run_dir / "starts").read_text().splitlines():
            _, end, now = map(int, line.split())
            assert 3600 - 5 <= end - now <= 3600 + 5
    (cancelled.run_dir / "plan").write_text(FINISH)
    cancelled.submit()
    assert cancelled.ended() == "COMPLETED" and cancelled.starts() == [0, 0]


def test_an_element_of_an_array_is_requeued_alone(make, scripts):
    runs = [make("m0", "save, exit 1", FINISH), make("m1", FINISH)]
    (scripts / "members").write_text("".join(f"{run.run_dir}\n" for run in runs))
    array = runs[0].slurm.sbatch(scripts / "array.sh")
    runs[0].slurm.wait(array)
    records = {record["ArrayTaskId"]: record for record in runs[0].slurm.records(array)}
    assert {key: (record["JobState"], record["Restarts"]) for key, record in records.items()} == {
        "0": ("COMPLETED", "1"),
        "1": ("COMPLETED", "0"),
    }
    assert runs[0].starts() == [0, 1] and runs[1].starts() == [0]
