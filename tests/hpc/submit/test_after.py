"""Check `submit.py --after RUN_DIR`: the dependency that the scheduler gets, and a checkpoint that is not there yet."""

import json
import shutil
from pathlib import Path

import pytest
from desk import Desk, qstat
from omegaconf import OmegaConf

from hpc.config import project
from hpc.run import attempt_log

CLUSTER = {"slurm": ["cluster=slurm"], "pbs": ["cluster=pbs", "cluster.account=a"]}
EVALUATE = ["--after", "train", "ckpt=train", "task=test", "run_dir=evaluate"]


def known(desk: Desk, **states: str) -> None:
    """Let both schedulers know these jobs: `j17="RUNNING"`."""
    jobs = {name.removeprefix("j"): state for name, state in states.items()}
    desk.command("squeue", "\n".join(f'echo "{job} {state} None"' for job, state in jobs.items()) or "exit 0")
    letters = {"RUNNING": "R", "PENDING": "Q", "FAILED": "F", "CANCELLED": "F"}
    desk.command("qstat", qstat({f"{job}.server": {"job_state": letters[state]} for job, state in jobs.items()}))


def queue(desk: Desk, job: str, *words: str, to: str = "slurm") -> int:
    """Submit a run whose job gets this number. Forget what the scheduler was asked before."""
    for name in ("sbatch", "qsub"):
        (desk.bin / f"{name}.argv").unlink(missing_ok=True)
    desk.scheduler(f"echo {job}")
    desk.set.delenv("HPC_RUN_DIR", raising=False)  # set by the previous run
    return desk.type(*CLUSTER[to], *words)


def options(desk: Desk, name: str = "sbatch") -> list[str]:
    return [line for line in desk.noted(f"{name}.argv").splitlines() if not line.endswith(".sh")]


def record(run_dir: str, outcome: str, job: str = "17") -> None:
    """Record an attempt that ended, as rank 0 of a job does."""
    path = Path(run_dir)
    attempt_log.record_start(path, 1, environ={"SLURM_JOB_ID": job}, hosts=["n1"], world_size=1)
    attempt_log.record_end(path, None, attempt=1, step=9, outcome=outcome)


def test_the_job_waits_for_a_run_that_has_no_checkpoint_yet(desk: Desk) -> None:
    assert queue(desk, "17", "run_dir=train") == 0
    known(desk, j17="RUNNING")
    assert queue(desk, "18", *EVALUATE) == 0, desk.err
    assert options(desk) == ["--parsable", "--dependency=afterok:17", "--kill-on-invalid-dep=yes"]
    assert "starts once job 17 has finished the run" in desk.out
    assert json.loads(Path("evaluate/submitted.json").read_text())["after"] == str(Path("train").absolute())
    known(desk, j17="RUNNING", j18="PENDING")
    predict = ["--after", "evaluate", "ckpt=train", "task=predict", "run_dir=predict"]
    assert queue(desk, "19", *predict) == 0, desk.err  # evaluate waits for train, so that one is finished, too
    assert options(desk)[1] == "--dependency=afterok:18"


@pytest.mark.parametrize("names", [[], ["last"], ["last", "best"]])
def test_which_checkpoint_is_looked_up_when_the_job_starts(names: list[str], desk: Desk) -> None:
    assert queue(desk, "17", "run_dir=train") == 0
    for name in names:
        Path(f"train/checkpoints/{name}.ckpt").mkdir(parents=True)
    known(desk, j17="RUNNING")
    assert queue(desk, "18", *EVALUATE) == 0, desk.err
    assert OmegaConf.load("evaluate/config.yaml").ckpt == "train"


def test_no_checkpoint_of_another_run_is_awaited(desk: Desk) -> None:
    for job, name in (("17", "train"), ("18", "other")):
        assert queue(desk, job, f"run_dir={name}") == 0
    known(desk, j17="RUNNING", j18="RUNNING")
    for words in (["ckpt=train", "task=test"], ["--after", "other", "ckpt=train", "task=test"]):
        assert queue(desk, "19", *words, "run_dir=evaluate") == 2
        assert "must be a run that has a checkpoint" in desk.err and "--after train" in desk.err
        assert not Path("evaluate").exists() and options(desk) == []
    Path("train/checkpoints/last.ckpt").mkdir(parents=True)
    assert queue(desk, "19", "ckpt=train", "task=test", "run_dir=evaluate") == 0, desk.err


def test_nothing_waits_for_a_finished_run(desk: Desk) -> None:
    assert queue(desk, "17", "run_dir=train") == 0
    record("train", "finished")
    assert queue(desk, "18", *EVALUATE) == 2 and "must be a run that has a checkpoint" in desk.err
    Path("train/checkpoints/best.ckpt").mkdir(parents=True)
    assert queue(desk, "18", *EVALUATE) == 0, desk.err
    assert options(desk) == ["--parsable"] and "train is finished already" in desk.err
    assert "after" not in json.loads(Path("evaluate/submitted.json").read_text())


def test_a_run_without_a_job_is_rejected(desk: Desk) -> None:
    assert queue(desk, "17", "run_dir=train") == 0
    Path("empty").mkdir()
    Path("loop").symlink_to("loop")
    for folder in ("empty", "nowhere", "loop", "x" * 300, "~nobody/run", ""):
        assert queue(desk, "18", "--after", folder) == 2
        assert "must be the directory of one run" in desk.err and desk.runs() == []
    for state, told in (("FAILED", "job 17 is failed"), ("", "job 17 is unknown to squeue")):
        known(desk, **({"j17": state} if state else {}))
        assert queue(desk, "18", *EVALUATE) == 2
        assert told in desk.err and f"submit.py resume={Path('train').absolute()}" in desk.err
    Path("train/submitted.json").unlink()
    assert queue(desk, "18", *EVALUATE) == 2 and "was never queued" in desk.err
    record("train", "continue", job="21")  # sbatch job.sh, typed by a person
    known(desk, j21="PENDING")
    assert queue(desk, "22", *EVALUATE) == 0 and "--dependency=afterok:21" in options(desk), desk.err


def test_a_sweep_waits_and_one_of_its_runs_is_waited_for(desk: Desk) -> None:
    assert queue(desk, "17", "run_dir=train") == 0
    known(desk, j17="RUNNING")
    assert queue(desk, "18", "--after", "train", "ckpt=train", "--multirun", "seed=1,2") == 0, desk.err
    assert "--dependency=afterok:17" in options(desk)
    (sweep,) = desk.runs()
    known(desk, j18_0="RUNNING", j18_1="PENDING")
    second = sorted(path for path in sweep.iterdir() if path.name.startswith("1_"))[0]
    assert queue(desk, "19", "--after", str(second), "run_dir=a") == 0 and "--dependency=afterok:18_1" in options(desk)
    assert queue(desk, "19", "--after", str(sweep), "run_dir=b") == 2 and "one of its runs" in desk.err


def test_a_run_that_is_queued_again_may_wait_too(desk: Desk) -> None:
    for job, name in (("17", "train"), ("18", "other")):
        assert queue(desk, job, f"run_dir={name}") == 0
    known(desk, j17="RUNNING")
    desk.scheduler("echo 19")
    assert desk.type("resume=other", "--after", "train") == 0, desk.err
    assert "--dependency=afterok:17" in options(desk)
    assert desk.type("resume=other") == 0 and "after" not in json.loads(Path("other/submitted.json").read_text())


def test_what_was_removed_waits_again_also_with_changes(desk: Desk) -> None:
    shutil.copytree(project.CONFIGS, desk.project / "configs", dirs_exist_ok=True)
    assert queue(desk, "17", "run_dir=train") == 0
    known(desk, j17="RUNNING")
    assert queue(desk, "18", *EVALUATE) == 0, desk.err
    known(desk, j17="RUNNING", j18="CANCELLED")
    desk.scheduler("echo 19")
    for words in (["--after", "train"], ["--after", "train", "cluster.time=2:00:00"]):
        (desk.bin / "sbatch.argv").unlink()
        assert desk.type("resume=evaluate", *words) == 0, desk.err
        assert "--dependency=afterok:17" in options(desk)
    assert desk.type("resume=evaluate", "cluster.time=3:00:00") == 2 and "has a checkpoint" in desk.err


def test_pbs_gets_the_dependency_for_each_job_of_a_chain(desk: Desk) -> None:
    assert queue(desk, "17.server", "run_dir=train", to="pbs") == 0
    known(desk, j17="RUNNING")
    assert queue(desk, "18.server", *EVALUATE, to="pbs") == 0, desk.err
    assert options(desk, "qsub") == ["-W", "depend=afterok:17"]
    assert queue(desk, "19.server", "--after", "train", "cluster.chain=2", "run_dir=a", to="pbs") == 0, desk.err
    first, second = ["-h", "-W", "depend=afterok:17"], ["-h", "-W", "depend=afterok:17,afternotok:19.server"]
    assert options(desk, "qsub") == first + second


def test_what_pbs_cannot_wait_for_is_rejected(desk: Desk) -> None:
    assert queue(desk, "17.server", "run_dir=train", "cluster.chain=2", to="pbs") == 0
    assert queue(desk, "18[].server", "--multirun", "seed=1,2", to="pbs") == 0
    known(desk, **{"j17": "RUNNING", "j18[0]": "RUNNING"})
    member = sorted(path for path in desk.runs()[0].iterdir() if path.name.startswith("0_"))[0]
    for run_dir in ("train", str(member)):
        assert queue(desk, "19.server", "--after", run_dir, "run_dir=a", to="pbs") == 2
        assert "PBS has no dependency on its end" in desk.err and not Path("a").exists()


def test_a_run_of_another_scheduler_is_rejected(desk: Desk) -> None:
    assert queue(desk, "17", "run_dir=train") == 0
    known(desk, j17="RUNNING")
    assert queue(desk, "18", *EVALUATE, to="pbs") == 2
    assert "must be a run of the same scheduler" in desk.err and not Path("evaluate").exists()


def test_a_job_that_has_ended_in_between_is_told(desk: Desk) -> None:
    assert queue(desk, "17", "run_dir=train") == 0
    known(desk, j17="RUNNING")
    desk.scheduler('echo "sbatch: error: Batch job submission failed: Job dependency problem" >&2; exit 1')
    assert desk.type("cluster=slurm", *EVALUATE) == 2
    assert "Job dependency problem" in desk.err and "has ended in the meantime" in desk.err
