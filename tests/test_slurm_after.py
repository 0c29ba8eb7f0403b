"""Test jobs that wait for a run on a real Slurm: train, evaluate, predict queued at once; and a training that fails."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm_nodes import ENDED
from slurm_project import QUIET, Desk, made_for_tests, wait_for

pytestmark = pytest.mark.soak

TRAIN = ["trainer.max_epochs=6", "checkpoint.every_n_steps=20", "callbacks.samples=null", "run_dir=runs/train"]


@dataclass
class Chain:
    """Run directories and jobs of a training, which was requeued, and of what was queued behind it."""

    desk: Desk
    jobs: dict[str, str]

    def run_dir(self, name: str) -> Path:
        return self.desk.project / "runs" / name

    def events(self, name: str, kind: str) -> list[dict]:
        lines = (self.run_dir(name) / "attempts.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def log(self, name: str) -> str:
        return (self.run_dir(name) / f"job-{self.jobs[name]}.log").read_text()

    def logs(self) -> str:
        logs = [path for name in self.jobs for path in self.run_dir(name).glob("job-*.log")]
        return "\n".join(path.read_text()[-1500:] for path in logs)


@pytest.fixture(scope="module")
def chain(slurm, bake) -> Chain:
    """Queue all jobs at once, let the training be requeued twice, once by itself, and wait for the last job."""
    desk = Desk(slurm, made_for_tests(bake(cluster="local")))
    chain = Chain(desk, {})
    words = ["cluster=test", "trainer=gpu", *QUIET]
    fault = ["callbacks.witness.fault=raise", "callbacks.witness.rank=0", "faults.retries=1", "run_dir=runs/broken"]
    chain.jobs["broken"], _ = desk.submit(*words, *fault)
    chain.jobs["waiting"], _ = desk.submit(
        *words, "--after", "runs/broken", "ckpt=runs/broken", "task=test", "run_dir=runs/waiting"
    )
    chain.jobs["train"], _ = desk.submit(*words, *TRAIN)
    for name, task, after in (("test", "test", "train"), ("predict", "predict", "test")):
        more = ["--after", f"runs/{after}", "ckpt=runs/train", f"task={task}", f"run_dir=runs/{name}"]
        chain.jobs[name], _ = desk.submit(*words, *more)
    for attempt, command in enumerate((["scancel", "--signal=USR2"], ["scontrol", "requeue"]), 1):
        saved = f"checkpoints/step-*-{attempt:03}"
        wait_for(lambda saved=saved: any(chain.run_dir("train").glob(saved)), 90, f"{saved}\n{chain.logs()}")
        slurm.call(*command, chain.jobs["train"])
    slurm.wait(chain.jobs["predict"], 180)
    return chain


def test_what_waits_starts_once_the_requeued_run_is_finished(chain):
    states = {name: chain.desk.slurm.show(chain.jobs[name]) for name in ("train", "test", "predict")}
    assert {record["JobState"] for record in states.values()} == {"COMPLETED"}, chain.logs()
    starts = chain.events("train", "start")
    assert 0 < starts[1]["from_step"] < starts[2]["from_step"] and states["train"]["Restarts"] == "2"
    for name, before in (("test", "train"), ("predict", "test")):
        assert chain.events(before, "end")[-1]["outcome"] == "finished"
        assert chain.events(name, "start")[0]["time"] >= chain.events(before, "end")[-1]["time"]


def test_it_uses_the_best_checkpoint_of_the_finished_run(chain):
    best = chain.run_dir("train") / "checkpoints" / "best.ckpt"
    for name, path in (("test", "runs/train/checkpoints/best.ckpt"), ("predict", best.resolve())):
        assert f"the run begins with the weights of {path}\n" in chain.log(name)
    assert (chain.run_dir("predict") / "predictions.pt").exists()
    assert chain.events("test", "end")[-1]["metrics"]["test/accuracy"] > 0.5


def test_what_waits_for_a_run_that_fails_is_removed_and_the_report_says_so(chain):
    slurm = chain.desk.slurm
    assert slurm.wait(chain.jobs["broken"])["JobState"] == "FAILED"
    assert slurm.wait(chain.jobs["waiting"], 30)["JobState"] in ENDED - {"COMPLETED"}
    assert not (chain.run_dir("waiting") / "attempts.jsonl").exists()
    table = chain.desk.python("report.py", "runs").stdout
    assert f"waiting: it waited for {chain.run_dir('broken')}, which failed" in table, table
    again = chain.desk.python("submit.py", "cluster=test", "--after", "runs/broken", "ckpt=runs/broken", "task=test")
    assert again.returncode == 2 and "the run is not finished" in again.stderr and "resume=" in again.stderr
