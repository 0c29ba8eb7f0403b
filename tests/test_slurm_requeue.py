"""Test on a real Slurm when a job script requeues its job. Ranks are replaced by a small program without torch."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPO
from slurm_nodes import ENDED, Slurm
from slurm_project import wait_for

pytestmark = pytest.mark.soak

# Start number n executes line n of `plan`, or its last line:
# save / exit CODE / verdict WORD / wait (for a signal; then save, verdict continue, exit 85) / hang (ignore signals)
# go (rank 0 exits with 1 once the file `go` exists) / die (rank 1 is killed, rank 0 exits with 86)
# claim (rank 0 claims the run directory; if rejected, both exit with 2) / hold (until the file `go` exists)
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

def take():
    from hpc.config import errors
    from hpc.launch import placement as launch
    from hpc.run import claim
    job, answer = launch.job_id(os.environ), run_dir / f"answer-{os.environ['SLURM_JOB_ID']}-{start}"
    if rank == "0":
        try:
            claim.take_claim(run_dir, dict(job=job, restart=start, host=os.uname().nodename, pid=os.getpid()))
            said = "yes"
        except errors.ConfigError as rejected:
            said = "no"
            print(rejected, flush=True)
        answer.write_text(said)
    while not answer.exists() or not (said := answer.read_text()):
        time.sleep(0.05)
    if said == "no":
        os._exit(2)

plan = (run_dir / "plan").read_text().splitlines()
for command in plan[min(start, len(plan) - 1)].split(", "):
    word, _, value = command.partition(" ")
    if word == "claim":
        take()
    (run_dir / f"{word}-{rank}-{start}").touch()
    while word == "hang" or word == "wait" and not told:
        time.sleep(0.05)
    while word in ("go", "hold") and not (run_dir / "go").exists():
        time.sleep(0.05)
    if word == "go" and rank == "0":
        os._exit(1)
    if word == "die" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "die":
        time.sleep(1)
        os._exit(86)
    if word in ("save", "wait"):
        time.sleep(1 if word == "wait" else 0)
        save()
    if word in ("verdict", "wait"):
        verdict(value or "continue")
    if word in ("exit", "wait"):
        sys.exit(int(value or 85))
"""
ENV = "export PATH={}:$PATH PYTHONPATH={}/src\n"
# Make job.sh as submit.py does, in a baked project.
WRITE = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, "src")
from hpc.config import compose, parse
from hpc.jobs import job, slurm
root = Path(sys.argv[1])
words = ["cluster=slurm", "trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "faults.retries=2"]
cfg = compose.compose_overrides(words)
places = {"run_dir": root / "RUN", "code": root / "RUN/code", "work_dir": root, "venv": None}
described = job.job_from_config(parse.parse(cfg), **places)
work = replace(described, cores_per_task=1, memory_gb=1, is_exclusive=False, partition=None, request=None)
(root / "job.sh").write_text(slurm.render_job_script(work))
array = replace(work, run_dir=None, members_file=root / "members", num_members=2)
(root / "array.sh").write_text(slurm.render_job_script(array))
"""


@dataclass
class Run:
    """A run directory and its job."""

    slurm: Slurm
    run_dir: Path
    job: str = ""

    def submit(self, *options: str) -> None:
        self.job = self.slurm.sbatch(*options, self.run_dir / "job.sh")

    def at(self, what: str, start: int = 0) -> "Run":
        """Wait until both ranks have reached a command of the plan."""
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
    (root / "src").symlink_to(REPO / "src")
    done = subprocess.run([sys.executable, "-c", WRITE, root], cwd=project, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def make(slurm, scripts) -> Callable[[str, str], Run]:
    """Return the function make(name, *plan), which makes a run without submitting it."""

    def make(name: str, *plan: str) -> Run:
        run_dir = scripts / name
        (run_dir / "code").mkdir(parents=True)
        (run_dir / "code" / "src").symlink_to(scripts / "src")  # job.sh sources files in it
        (run_dir / "code" / "env.sh").write_text(ENV.format(Path(sys.executable).parent, scripts))
        (run_dir / "code" / "train.py").write_text(RANK)
        (run_dir / "plan").write_text("\n".join(plan) + "\n")
        (run_dir / "job.sh").write_text((scripts / "job.sh").read_text().replace("/RUN", f"/{name}"))
        return Run(slurm, run_dir)

    return make


FINISH = "save, verdict finished"
STAY = "--nodelist=n1,n3"  # not on nodes that a test disconnects, so that all can run at the same time


@pytest.fixture(scope="module")
def alone(make) -> dict[str, Run]:
    """Submit all runs whose ranks exit without a signal. They run at once, as each start takes seconds."""
    runs = {
        "goes_on": make("goes_on", "save, verdict continue, exit 85", FINISH),
        "crashes": make("crashes", "save, exit 1", "exit 1", "save, exit 1", "exit 1", FINISH),
        "loops": make("loops", "save, exit 1", "exit 1"),
        "rejects": make("rejects", "exit 2"),
        "fails": make("fails", "verdict failed, exit 1"),
        "leaves": make("leaves", "exit 0", FINISH),
        "dies": make("dies", "die", FINISH),
    }
    for run in runs.values():
        run.submit(STAY)
    return runs


@pytest.fixture(scope="module")
def array(make, scripts) -> tuple[str, list[Run]]:
    """Submit a job array, and return its id and its runs."""
    runs = [make("m0", "save, exit 1", FINISH), make("m1", FINISH)]
    (scripts / "members").write_text("".join(f"{run.run_dir}\n" for run in runs))
    (scripts / "code").symlink_to(runs[0].run_dir / "code")
    return runs[0].slurm.sbatch(STAY, scripts / "array.sh"), runs


@pytest.fixture(scope="module")
def twice(make) -> tuple[Run, Run]:
    """Submit the same run twice."""
    first = make("twice", f"claim, hold, {FINISH}")
    second = Run(first.slurm, first.run_dir)
    for run in (first, second):
        run.submit(STAY)
    return first, second


def test_ranks_that_are_told(make, alone, array, twice):
    """Check that ranks save on a signal, that a cancelled job is not requeued, and that others are, once."""
    runs = {name: make(name, "wait", FINISH) for name in ("cancelled", "signalled", "requeued")}
    for run in runs.values():
        run.submit("--nodelist=n2,n4")
    for run in runs.values():
        run.at("wait")
    slurm, cancelled = runs["signalled"].slurm, runs["cancelled"]
    slurm.cancel("--full", "--signal=TERM", runs["signalled"].job)
    slurm.call("scontrol", "requeue", runs["requeued"].job)
    slurm.cancel(cancelled.job)  # SIGTERM, and SIGKILL five seconds later
    states = set()
    while (state := slurm.show(runs["signalled"].job)["JobState"]) and not runs["signalled"].there("save", 1):
        states.add(state)
        assert not states & ENDED, "nobody takes it for completed in mid-training"
    assert cancelled.ended() == "CANCELLED" and cancelled.starts() == [0]
    for name in ("signalled", "requeued"):
        started_again(runs[name])
    for run in runs.values():
        assert (run.run_dir / "checkpoints" / "step-000000001").is_dir(), run.log()
        start, end, now = map(int, (run.run_dir / "starts").read_text().splitlines()[0].split())
        assert start == 0 and 3595 <= end - now <= 3605, "HPC_JOB_END"
    assert slurm.show(cancelled.job)["JobState"] == "CANCELLED"
    (cancelled.run_dir / "plan").write_text(FINISH)
    cancelled.submit()
    assert cancelled.ended() == "COMPLETED" and cancelled.starts() == [0, 0]


def test_what_the_cluster_does(make, alone, array, twice):
    """Check the requeue after the end of the wall time, the death of a slurmd and the loss of a network link.

    Ranks may ignore the signal. Each job must be requeued once, on other nodes if necessary. The nodes must recover.
    """
    limited, hung = make("limited", "wait", FINISH), make("hung", "hang", FINISH)
    daemon, cable = make("daemon", "hang", FINISH), make("cable", "go, hang", FINISH)
    script = cable.run_dir / "job.sh"
    script.write_text(re.sub(r"--wait=\d+", "--wait=3", script.read_text()))  # so that srun gives up before Slurm does
    for run, nodes in ((limited, "n1,n3"), (hung, "n1,n3"), (daemon, "n1,n2"), (cable, "n3,n4")):
        run.submit(f"--nodelist={nodes}")
    for run, word in ((limited, "wait"), (hung, "hang"), (daemon, "hang"), (cable, "go")):
        run.at(word)
    slurm = daemon.slurm
    for run in (limited, hung):
        slurm.call("scontrol", "update", f"job={run.job}", "EndTime=now+1")
    slurm.stop_slurmd("n2")
    slurm.cut("n4")
    (cable.run_dir / "go").touch()
    for run in (daemon, cable):  # allow them any nodes
        slurm.until(run.job, lambda records: records[0]["JobState"] == "PENDING", 60)
        slurm.call("scontrol", "update", f"job={run.job}", "ReqNodeList=")
    for run in (limited, hung, daemon, cable):
        started_again(run)
    assert (limited.run_dir / "checkpoints" / "step-000000001").is_dir(), limited.log()
    assert "is requeued" in cable.log() and "is requeued" not in daemon.log()
    slurm.start_slurmd("n2")
    slurm.mend("n4")
    assert sorted(slurm.call("srun", "--nodes=4", "hostname").stdout.split()) == ["n1", "n2", "n3", "n4"]


def test_an_element_of_an_array_is_requeued_alone(array):
    job, runs = array
    slurm = runs[0].slurm
    slurm.wait(job)
    told = {record["ArrayTaskId"]: (record["JobState"], record["Restarts"]) for record in slurm.records(job)}
    assert told == {"0": ("COMPLETED", "1"), "1": ("COMPLETED", "0")}
    assert runs[0].starts() == [0, 1] and runs[1].starts() == [0]


def test_two_jobs_of_one_run(twice):
    """Check that of two jobs of one run only one trains, and that the other names it. A later job finds it finished."""
    slurm = twice[0].slurm
    wait_for(lambda: any(slurm.show(run.job)["JobState"] in ENDED for run in twice), 40, "one of them rejects")
    first, second = sorted(twice, key=lambda run: slurm.show(run.job)["JobState"] in ENDED)
    assert slurm.show(first.job)["JobState"] == "RUNNING", first.log()
    assert (second.ended(), slurm.show(second.job)["ExitCode"]) == ("FAILED", "2:0"), second.log()
    assert f"Job {first.job} on" in second.log() and f"scancel {first.job}" in second.log(), second.log()
    (first.run_dir / "go").touch()
    assert first.ended() == "COMPLETED", first.log()
    starts = first.starts()
    second.submit()
    assert second.ended() == "COMPLETED" and "finished already" in second.log() and second.starts() == starts


def test_ranks_that_end_by_themselves(alone):
    """Check requeues by exit code and verdict: to continue and after a crash, but not after a rejection or forever."""
    expected = {
        "goes_on": ("COMPLETED", [0, 1]),
        "leaves": ("COMPLETED", [0, 1]),
        "dies": ("COMPLETED", [0, 1]),
        "rejects": ("FAILED", [0]),
        "fails": ("FAILED", [0]),
        "loops": ("FAILED", [0, 1, 2]),
        "crashes": ("COMPLETED", [0, 1, 2, 3, 4]),
    }
    for name, (state, starts) in expected.items():
        assert (alone[name].ended(), alone[name].starts()) == (state, starts), alone[name].log()
    assert "rejected" in alone["rejects"].log()
    assert alone["rejects"].slurm.show(alone["rejects"].job)["ExitCode"] == "2:0"
    assert "2 starts in a row brought no newer checkpoint" in alone["loops"].log()
    assert (alone["loops"].run_dir / "stalled").read_text() == "2\n"
    assert f"to continue: sbatch {alone['loops'].run_dir}/job.sh\n" in alone["loops"].log()

    again = [alone[name] for name in ("goes_on", "loops", "fails")]  # submitted again by hand
    for run in again:
        (run.run_dir / "plan").write_text(FINISH)
        run.submit()
    assert [run.ended() for run in again] == ["COMPLETED"] * 3
    assert again[0].starts() == [0, 1] and "finished already" in again[0].log()


def started_again(run: Run) -> None:
    """Check that the run was requeued exactly once, also by Slurm's count."""
    assert run.ended() == "COMPLETED" and run.starts() == [0, 1], run.log()
    assert run.slurm.show(run.job)["Restarts"] == "1", run.log()


def test_in_an_allocation_nothing_is_requeued(make):
    """Check that `bash job.sh` in salloc does not requeue but prints how to resume, and that Ctrl-C ends the ranks."""
    run = make("salloc", "exit 7")
    salloc = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--mem=1G", "bash"]
    done = run.slurm.call(*salloc, run.run_dir / "job.sh", check=False)
    assert done.returncode == 7 and "not requeued; to continue: sbatch " in done.stdout, done.stdout

    (run.run_dir / "plan").write_text("hang\n")
    command = [*salloc, str(run.run_dir / "job.sh")]
    typed = subprocess.Popen(command, env=run.slurm.env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    run.at("hang")
    os.killpg(typed.pid, signal.SIGINT)
    typed.communicate(timeout=30)
    assert typed.returncode
