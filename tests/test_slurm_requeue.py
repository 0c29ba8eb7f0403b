"""What a job script does when its ranks end, or it is told to, on a real Slurm. Without torch: stand-ins for ranks."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_nodes import ENDED, Slurm
from slurm_project import wait_for

pytestmark = pytest.mark.slow

# Does what the line of `plan` says that belongs to this start, the last one from then on:
# save / exit CODE / verdict WORD / wait (until told; then saves, verdict continue, 85) / hang (hears nothing)
# go (rank 0 ends with 1 as soon as there is a file of that name)
RANK = """\
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
    while word == "go" and not (run_dir / "go").exists():
        time.sleep(0.05)
    if word == "go" and rank == "0":
        os._exit(1)
    if word in ("save", "wait"):
        time.sleep(1 if word == "wait" else 0)
        save()
    if word in ("verdict", "wait"):
        verdict(value or "continue")
    if word in ("exit", "wait"):
        sys.exit(int(value or 85))
"""
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
        """Wait until both ranks have come to a word of the plan."""
        wait_for(lambda: self.there(what, start), 40, f"{self.run_dir} {what}\n{self.log()}")
        return self

    def there(self, what: str, start: int = 0) -> bool:
        return all((self.run_dir / f"{what}-{rank}-{start}").exists() for rank in (0, 1))

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


FINISH = "save, verdict finished"


@pytest.fixture(scope="module")
def alone(make) -> dict[str, Run]:
    """Runs whose ranks end by themselves: all submitted at once, as each start costs seconds."""
    runs = {
        "goes_on": make("goes_on", "save, verdict continue, exit 85", FINISH),
        "crashes": make("crashes", "save, exit 1", "exit 1", "exit 1", "save, exit 1", "exit 1", FINISH),
        "loops": make("loops", "save, exit 1", "exit 1"),
        "refuses": make("refuses", "exit 2"),
        "fails": make("fails", "verdict failed, exit 1"),
        "leaves": make("leaves", "exit 0", FINISH),
    }
    for run in runs.values():
        run.submit()
    return runs


def test_ranks_that_are_told(make, alone):
    """By signals from outside: all save; who was cancelled does not come back, the others do, once."""
    plans = {"cancelled": "wait", "signalled": "wait", "requeued": "wait", "limited": "wait", "hung": "hang"}
    runs = {name: make(name, plan, FINISH) for name, plan in plans.items()}
    for run in runs.values():
        run.submit()
    for name, run in runs.items():
        run.at(plans[name])
    slurm = runs["hung"].slurm
    slurm.cancel("--signal=TERM", runs["signalled"].job)
    for name in ("limited", "hung"):
        slurm.call("scontrol", "update", f"job={runs[name].job}", "EndTime=now+1")
    slurm.call("scontrol", "requeue", runs["requeued"].job)
    slurm.cancel(runs["cancelled"].job)
    states = set()
    while (state := slurm.show(runs["signalled"].job)["JobState"]) and not runs["signalled"].there("save", 1):
        states.add(state)
        assert not states & ENDED, "nobody takes it for completed in mid-training"
    assert runs["cancelled"].ended() == "CANCELLED"
    for name in ("signalled", "requeued", "limited", "hung"):
        run = runs[name]
        assert run.ended() == "COMPLETED", run.log()
        assert run.starts() == [0, 1] and slurm.show(run.job)["Restarts"] == "1", run.log()
    for name in plans:
        assert (runs[name].run_dir / "checkpoints" / "step-000000001").is_dir(), runs[name].log()
        start, end, now = map(int, (runs[name].run_dir / "starts").read_text().splitlines()[0].split())
        assert start == 0 and 3595 <= end - now <= 3605, "HPC_JOB_END"
    again = runs["cancelled"]
    assert again.starts() == [0] and slurm.show(again.job)["JobState"] == "CANCELLED"
    (again.run_dir / "plan").write_text(FINISH)
    again.submit()
    assert again.ended() == "COMPLETED" and again.starts() == [0, 0]


def test_an_element_of_an_array_is_requeued_alone(make, scripts):
    runs = [make("m0", "save, exit 1", FINISH), make("m1", FINISH)]
    (scripts / "members").write_text("".join(f"{run.run_dir}\n" for run in runs))
    array = runs[0].slurm.sbatch(scripts / "array.sh")
    runs[0].slurm.wait(array)
    records = {record["ArrayTaskId"]: record for record in runs[0].slurm.records(array)}
    told = {key: (record["JobState"], record["Restarts"]) for key, record in records.items()}
    assert told == {"0": ("COMPLETED", "1"), "1": ("COMPLETED", "0")}
    assert runs[0].starts() == [0, 1] and runs[1].starts() == [0]


def test_ranks_that_end_by_themselves(alone):
    """Requeued after a verdict to go on and after a crash; not after a refusal, nor for ever; done when finished."""
    expected = {
        "goes_on": ("COMPLETED", [0, 1]),
        "leaves": ("COMPLETED", [0, 1]),
        "refuses": ("FAILED", [0]),
        "fails": ("FAILED", [0]),
        "loops": ("FAILED", [0, 1, 2, 3]),
        "crashes": ("COMPLETED", [0, 1, 2, 3, 4, 5]),
    }
    for name, (state, starts) in expected.items():
        assert (alone[name].ended(), alone[name].starts()) == (state, starts), alone[name].log()
    assert "refused" in alone["refuses"].log()
    assert alone["refuses"].slurm.show(alone["refuses"].job)["ExitCode"] == "2:0"
    assert "3 starts in a row brought no newer checkpoint" in alone["loops"].log()
    assert (alone["loops"].run_dir / "stalled").read_text() == "3\n"
    assert f"to go on: sbatch {alone['loops'].run_dir}/job.sh\n" in alone["loops"].log()

    again = [alone[name] for name in ("goes_on", "loops", "fails")]  # by hand
    for run in again:
        (run.run_dir / "plan").write_text(FINISH)
        run.submit()
    assert [run.ended() for run in again] == ["COMPLETED"] * 3
    assert again[0].starts() == [0, 1] and "finished already" in again[0].log()


def test_nodes_that_are_gone(make):
    """A daemon that died, and a pulled cable: the job goes on elsewhere, once; and the nodes come back."""
    daemon, cable = make("daemon", "hang", FINISH), make("cable", "go, hang", FINISH)
    script = cable.run_dir / "job.sh"
    script.write_text(script.read_text().replace("--wait=60", "--wait=3"))  # so that srun gives up before Slurm does
    slurm = daemon.slurm
    for run, nodes in ((daemon, "n1,n2"), (cable, "n3,n4")):
        run.job = slurm.sbatch(f"--nodelist={nodes}", run.run_dir / "job.sh")
    daemon.at("hang")
    cable.at("go")
    slurm.stop_slurmd("n2")
    slurm.cut("n4")
    (cable.run_dir / "go").touch()
    for run in (daemon, cable):  # where there are nodes
        slurm.until(run.job, lambda records: records[0]["JobState"] == "PENDING", 60)
        slurm.call("scontrol", "update", f"job={run.job}", "ReqNodeList=")
    for run in (daemon, cable):
        assert run.ended() == "COMPLETED" and run.starts() == [0, 1], run.log()
        assert slurm.show(run.job)["Restarts"] == "1"
    assert "is requeued" in cable.log() and "is requeued" not in daemon.log()
    slurm.start_slurmd("n2")
    slurm.mend("n4")
    assert sorted(slurm.call("srun", "--nodes=4", "hostname").stdout.split()) == ["n1", "n2", "n3", "n4"]


def test_in_an_allocation_nothing_is_requeued(make):
    """`bash job.sh` inside salloc: told what to type; Ctrl-C ends the ranks."""
    run = make("salloc", "exit 7")
    salloc = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--mem=1G", "bash"]
    done = run.slurm.call(*salloc, run.run_dir / "job.sh", check=False)
    assert done.returncode == 7 and "not requeued; to go on: sbatch " in done.stdout, done.stdout

    (run.run_dir / "plan").write_text("hang\n")
    command = [*salloc, str(run.run_dir / "job.sh")]
    typed = subprocess.Popen(command, env=run.slurm.env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    run.at("hang")
    os.killpg(typed.pid, signal.SIGINT)
    typed.communicate(timeout=30)
    assert typed.returncode
