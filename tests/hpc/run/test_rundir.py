"""Check that each run gets its own directory, also with several runs in one job, and keeps it when the job restarts."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from hpc.config import compose, errors, freezing, parse
from hpc.launch.placement import read_placement
from hpc.run import attempt_log, command_line, directory
from hpc.training import meet_ranks

# Variables that `srun --pty bash` sets for every command typed in it.
SHELL = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
SHELL |= {"SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
BATCH = {"PBS_JOBID": "18.server", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBCOOKIE": "0" * 32}
# What each scheduler changes when it starts the same job again.
AGAIN = [(SHELL, SHELL | {"SLURM_RESTART_COUNT": "1"}), (BATCH, BATCH | {"PBS_JOBCOOKIE": "1" * 32})]

Start = Callable[..., Path]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """Start and end a run as train.py does; return its directory."""
    monkeypatch.setattr(directory, "PROJECT", tmp_path)
    before = dict(os.environ)

    def forget() -> None:
        os.environ.clear()
        os.environ.update(before)

    def run(*words: str, outcome: str = "finished", **environ: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        forget()
        os.environ.update(environ)
        cfg, here = parse.parse(compose.compose_overrides(words)), read_placement(os.environ)
        fresh = directory.choose_run_dir(
            cfg.run_dir, cfg.name, now=datetime.now(), environ=os.environ, step=here.step or "0"
        )
        beginning = meet_ranks.begin_attempt(cfg, here, new_run_dir=fresh, is_frozen=False, environ=os.environ)
        run_dir = Path(cfg.run_dir)
        assert beginning.claim
        if not (run_dir / "config.yaml").exists():
            (run_dir / "config.yaml").write_text(freezing.to_frozen_yaml(cfg.node))
            (run_dir / "overrides.json").write_text(json.dumps(words))
        attempt_log.record_start(run_dir, beginning.attempt, environ=os.environ)
        attempt_log.record_end(run_dir, beginning.claim, attempt=beginning.attempt, step=0, outcome=outcome)
        beginning.claim.release()
        return run_dir

    yield run
    forget()


CPU = "trainer=cpu"


def test_a_process_that_begins_two_within_a_second_names_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "PROJECT", tmp_path)
    monkeypatch.setenv(directory.RUN_DIR_VARIABLE, "")  # so that monkeypatch restores it afterwards
    monkeypatch.delenv(directory.RUN_DIR_VARIABLE)
    now = datetime.now()
    first = directory.choose_run_dir(None, "sweep", now=now, environ={})
    for _ in range(3):
        directory.create_run_dir(directory.choose_run_dir(None, "sweep", now=now, environ={}), free_bytes=0)
        monkeypatch.delenv(directory.RUN_DIR_VARIABLE)
    assert sorted((tmp_path / "runs").iterdir()) == [first, *(first.with_name(f"{first.name}-{n}") for n in (2, 3))]


@pytest.mark.slow
@pytest.mark.parametrize(("shell", "number"), [(SHELL, 17), (BATCH, 18)])
def test_each_run_of_a_job_has_a_directory_of_its_own(start: Start, shell: dict[str, str], number: int) -> None:
    dirs = [start(CPU, f"seed={seed}", **shell).name for seed in (1, 2, 2)]
    assert dirs == [f"digits_resnet_{number}", f"digits_resnet_{number}-2", f"digits_resnet_{number}-3"]


@pytest.mark.parametrize(("before", "after"), AGAIN)
def test_a_job_that_is_started_again_goes_on_with_the_run_that_it_names(
    start: Start, tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    words = [CPU, "seed=1", f"run_dir={tmp_path / 'named'}"]
    run_dir = start(*words, outcome="continue", **before)
    assert start(*words, outcome="continue", **after) == run_dir
    assert [event["attempt"] for event in attempt_log.read_starts(run_dir)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), AGAIN)
def test_a_job_that_is_started_again_and_names_no_run_begins_no_other(
    start: Start, before: dict[str, str], after: dict[str, str]
) -> None:
    run_dir = start(CPU, outcome="continue", **before)
    with pytest.raises(errors.ConfigError, match=f"run_dir={run_dir}"):
        start(CPU, **after)
    assert list(run_dir.parent.iterdir()) == [run_dir]
    assert start(CPU, f"run_dir={run_dir}", **after) == run_dir, "as the sentence says"


def test_what_a_job_has_finished_is_no_failure_when_it_is_started_again(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for number, (first, again) in enumerate(AGAIN):
        words = [CPU, f"run_dir={tmp_path / str(number)}"]
        run_dir = start(*words, **first)
        with pytest.raises(SystemExit) as left, errors.exit_on_config_error():
            start(*words, **again)
        assert left.value.code == 0
        said = capfd.readouterr()
        assert said.out.endswith(f"The run is finished already\nrun directory {run_dir}\n") and not said.err
        assert "outcome finished" in (run_dir / "verdict").read_text()


def test_who_asks_for_a_finished_run_is_told(start: Start) -> None:
    run_dir = start(CPU, **SHELL)
    with pytest.raises(errors.ConfigError, match="The run is finished") as caught:
        command_line.compose(None, [f"resume={run_dir}"])
    assert not isinstance(caught.value, errors.RunFinished)


def test_of_many_at_once_each_has_its_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(
            pool.map(
                lambda _: directory.reserve_run_dir(tmp_path / "runs" / "x"),
                range(24),
            )
        )
    assert len(set(made)) == 24 and all(path.is_dir() for path in made)


def test_files_of_others_are_not_replaced(start: Start, tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "verdict").write_text("they like it")
    for folder, words in {tmp_path / "paper": "verdict", directory.PROJECT: "the project's folder"}.items():
        with pytest.raises(errors.ConfigError, match=words):
            start(CPU, f"run_dir={folder}")
    assert (tmp_path / "paper" / "verdict").read_text() == "they like it"
    for folder in (tmp_path / "scratch", tmp_path / "linked"):
        folder.mkdir()
    (tmp_path / "linked" / "checkpoints").symlink_to(tmp_path / "scratch")
    start(CPU, f"run_dir={tmp_path / 'linked'}")  # its checkpoints/ links to an empty folder
    run_dir = start(CPU, f"run_dir={tmp_path / 'mine'}", outcome="continue")
    (run_dir / "config.yaml").unlink()  # left by an attempt that failed before it started
    assert start(CPU, f"run_dir={run_dir}") == run_dir


def test_what_is_no_run_of_this_job_is_left_alone(start: Start, tmp_path: Path) -> None:
    (tmp_path / "runs" / "digits_resnet_17").mkdir(parents=True)
    (tmp_path / "runs" / "digits_resnet_17-2").write_text("a file")
    assert start(CPU, **SHELL, SLURM_RESTART_COUNT="1").name == "digits_resnet_17-3"
