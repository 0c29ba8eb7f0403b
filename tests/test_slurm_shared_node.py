"""Test on a real Slurm that runs of a sweep share nodes, where jobs get whole ones, and leave each other alone."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO
from slurm_nodes import Slurm
from slurm_project import QUIET, Desk, made_for_tests, wait_for
from test_slurm_requeue import ENV, FINISH, RANK
from trial import same

pytestmark = pytest.mark.soak

# Each run waits in its second step for the file `go` in its run directory. The second one has a loss that is infinite.
RATES = ["0.01", "1e30", "0.02", "0.03", "0.04", "0.05"]
BROKEN, KILLED = 1, 2
SWEEP = ["cluster=test", "trainer=gpu", *QUIET, "trainer.max_steps=4", "checkpoint.every_n_steps=1"]
SWEEP += [
    "callbacks.witness.fault=hold",
    "callbacks.witness.rank=0",
    f"model.optimizer.lr={','.join(RATES)}",
    "--multirun",
]
OTHERS = re.compile("rank-|go$")  # files that the tests themselves have written
# Make the script of an array whose runs share nodes, as submit.py does, in a baked project.
WRITE = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, "src")
from hpc.config import compose, parse
from hpc.jobs import job, shared_node, slurm
root = Path(sys.argv[1])
words = ["cluster=slurm", "trainer=gpu", "cluster.whole_nodes=true", "faults.retries=2", "cluster.request=null"]
cfg = parse.parse(compose.compose_overrides(words))
places = {"members_file": root / "members", "code": root / "code", "work_dir": root, "venv": None}
described = replace(job.job_from_config(cfg, num_members=4, **places), cores_per_task=1)
(root / "job.sh").write_text(slurm.render_job_script(shared_node.share_node(described, cfg.cluster)))
"""


class Sweep:
    """A submitted sweep of a baked project."""

    def __init__(self, desk: Desk, *words: str) -> None:
        self.desk = desk
        self.job, self.folder = desk.submit(*SWEEP, *words)
        self.members = [Path(line) for line in (self.folder / "members").read_text().splitlines()]

    def let_go(self, *numbers: int) -> None:
        for number in numbers:
            (self.members[number] / "go").touch()

    def seen(self, number: int) -> dict:
        """Return what the rank of a run has written down, once it has started to train."""
        file = self.members[number] / "rank-0.json"
        wait_for(lambda: file.exists() and file.read_text().endswith("}"), 180, f"run {number} trains\n{self.logs()}")
        return json.loads(file.read_text())

    def await_text(self, number: int, name: str, text: str) -> None:
        file = self.members[number] / name
        wait_for(lambda: file.exists() and text in file.read_text(), 120, f"{text} in {file}\n{self.logs()}")

    def elements(self) -> dict[str, tuple[str, str]]:
        records = self.desk.slurm.records(self.job)
        return {record["ArrayTaskId"]: (record["JobState"], record["Restarts"]) for record in records}

    def resources_of_steps(self) -> list[str]:
        """Return the cores and the memory of each step that runs."""
        numbers = [record["JobId"] for record in self.desk.slurm.records(self.job)]
        steps = [f"{number}.{step}" for number in numbers for step in range(4)]
        shown = [self.desk.slurm.call("scontrol", "show", "step", step, check=False).stdout for step in steps]
        return re.findall(r" TRES=(\S+?),node=1", "".join(shown))

    def num_starts(self) -> list[int]:
        logs = [(member / "attempts.jsonl").read_text() for member in self.members]
        return [sum(json.loads(line)["event"] == "start" for line in log.splitlines()) for log in logs]

    def states(self) -> list[str]:
        """Return the states in the table of report.py."""
        done = self.desk.python("report.py", str(self.folder))
        assert done.returncode == 0, done.stderr
        rows = {line.split()[0].rpartition("/")[2]: line for line in done.stdout.splitlines() if "/" in line}
        states = [re.search(r" (finished|failed|running|to be continued|pending)", rows[m.name]) for m in self.members]
        return [state[1] if state else "" for state in states]

    def logs(self) -> str:
        return "\n".join(f"{path}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.rglob("job-*.log")))


@pytest.fixture(scope="module")
def desk(slurm, bake) -> Desk:
    return Desk(slurm, made_for_tests(bake(cluster="local")))


def test_runs_share_nodes_and_leave_each_other_alone(desk):
    sweep = Sweep(desk, "cluster.whole_nodes=true")
    seen = [sweep.seen(number) for number in range(6)]
    assert len({run["host"] for run in seen[:4]}) == len({run["host"] for run in seen[4:]}) == 1
    assert len({run["host"] for run in seen}) == 2
    assert sorted(run["CUDA_VISIBLE_DEVICES"] for run in seen[:4]) == ["0", "1", "2", "3"]
    assert sorted(run["CUDA_VISIBLE_DEVICES"] for run in seen[4:]) == ["0", "1"]
    assert {run["SLURM_CPUS_PER_TASK"] for run in seen} == {"2"}
    assert sweep.resources_of_steps() == ["cpu=2,mem=3G"] * 6

    sweep.let_go(BROKEN)
    sweep.await_text(BROKEN, "ended", f"{sweep.job}_0 failed")
    desk.slurm.exec(seen[KILLED]["host"], "kill", "-9", str(seen[KILLED]["pid"]))
    sweep.await_text(KILLED, "ended", f"{sweep.job}_0 continue")
    assert sweep.elements() == {"0": ("RUNNING", "0"), "1": ("RUNNING", "0")}, sweep.logs()
    assert sweep.states() == ["running", "failed", "to be continued", "running", "running", "running"]
    assert sweep.num_starts() == [1] * 6

    again, _ = desk.submit(f"resume={sweep.members[BROKEN]}")  # alone, while the others go on
    assert desk.slurm.wait(again, 120)["JobState"] == "FAILED" and sweep.num_starts() == [1, 2, 1, 1, 1, 1]
    assert sweep.elements()["0"] == ("RUNNING", "0") and sweep.states()[BROKEN] == "failed"

    sweep.let_go(0, 2, 3, 4, 5)
    desk.slurm.wait(sweep.job, 240)
    assert sweep.elements() == {"0": ("FAILED", "1"), "1": ("COMPLETED", "0")}, sweep.logs()
    assert sweep.num_starts() == [1, 2, 2, 1, 1, 1]
    assert sweep.states() == ["finished", "failed", *["finished"] * 4], sweep.logs()
    log = (sweep.members[BROKEN] / f"job-{sweep.job}_0.log").read_text()
    assert "has failed before, so it is not started again; to continue: sbatch " in log

    alone = Sweep(desk)
    alone.let_go(*range(6))
    desk.slurm.wait(alone.job, 240)
    assert sorted(alone.elements()) == ["0", "1", "2", "3", "4", "5"]
    for number in set(range(6)) - {BROKEN}:
        assert same.differences(alone.members[number], sweep.members[number], others=OTHERS) == []


def test_trials_of_a_search_that_share_a_node_draw_values_of_their_own(desk):
    words = ["cluster=test", "cluster.whole_nodes=true", "trainer=gpu", *QUIET, "trainer.max_epochs=1"]
    space = ["trainer.limit_train_batches=2", "model.optimizer.lr=tag(log, interval(1e-4, 1e-2))"]
    job, folder = desk.submit("--search", "random", "--trials", "3", *words, *space)
    record = desk.slurm.wait(job, 180)
    logs = "\n".join(path.read_text()[-1500:] for path in folder.rglob("job-*.log"))
    assert (record["JobState"], record["ArrayTaskId"]) == ("COMPLETED", "0"), logs
    drawn = [json.loads((folder / name / "overrides.json").read_text()) for name in ("000", "001", "002")]
    assert len({words[-1] for words in drawn}) == 3, drawn
    assert desk.python("report.py", str(folder)).stdout.count("finished") >= 3, logs


# -- The end of the wall time, with ranks that are a small program --


@pytest.fixture(scope="module")
def make(slurm, project, tmp_path_factory) -> Callable[..., tuple[Slurm, list[Path], Path]]:
    """Return the function make(*plans), which makes an array of runs that share a node, without submitting it."""
    root = tmp_path_factory.mktemp("shared")
    (root / "code").mkdir()
    (root / "code" / "src").symlink_to(REPO / "src")
    (root / "code" / "env.sh").write_text(ENV.format(Path(sys.executable).parent, root / "code"))
    (root / "code" / "train.py").write_text(RANK)
    done = subprocess.run([sys.executable, "-c", WRITE, root], cwd=project, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def make(*plans: list[str]) -> tuple[Slurm, list[Path], Path]:
        runs = [root / f"run {number}" for number in range(len(plans))]
        for run_dir, plan in zip(runs, plans, strict=True):
            run_dir.mkdir()
            (run_dir / "code").symlink_to(root / "code")
            (run_dir / "plan").write_text("\n".join(plan) + "\n")
        (root / "members").write_text("".join(f"{run_dir}\n" for run_dir in runs))
        return slurm, runs, root

    return make


def test_at_the_end_of_the_wall_time_the_runs_that_are_left_go_on(make):
    """Check it with a run that saves on the signal, one that ignores it and is killed, and two that have ended."""
    plans = {"saves": ["wait", FINISH], "hangs": ["hang", FINISH], "finished": [FINISH]}
    slurm, runs, root = make(*plans.values(), ["verdict failed, exit 1", FINISH])
    job = slurm.sbatch(root / "job.sh")
    for run_dir, name in zip(runs, ("wait-0-0", "hang-0-0", "verdict-0-0", "ended"), strict=True):
        wait_for((run_dir / name).exists, 60, f"{run_dir} {name}")
    slurm.call("scontrol", "update", f"job={job}_0", "EndTime=now+1")
    slurm.wait(job, 120)
    logs = "\n".join(path.read_text() for path in root.rglob("job-*.log"))
    assert ["".join(line[0] for line in (run / "starts").open()) for run in runs] == ["01", "01", "0", "0"], logs
    assert (runs[0] / "checkpoints" / "step-000000001").is_dir(), "it has saved"
    record = slurm.show(job)
    assert (record["JobState"], record["Restarts"]) == ("FAILED", "1"), logs
