"""Check `python report.py` with run directories and schedulers that answer as real ones do."""

import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from desk import qstat
from fork import PROJECT
from omegaconf import OmegaConf
from rich.console import Console

from hpc.config import compose, errors, parse
from hpc.jobs import job, job_states
from hpc.report import latest_metric, run_table
from hpc.run import attempt_log, causes, history, job_logs
from hpc.submit import scheduler

NOW = 1_800_000_000.0
TESTED = {"test/loss": 0.7, "test/accuracy": 0.91}
Clock = Callable[[float], None]


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for all commands on the PATH, empty at first. The file `calls` records their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Set the current time, in minutes before NOW."""
    minutes = [0.0]
    monkeypatch.setattr(time, "time", lambda: NOW - 60 * minutes[0])
    return lambda before: minutes.__setitem__(0, before)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def work() -> job.Job:
    node = compose.compose_overrides(["trainer=ddp", "cluster=slurm", "trainer.num_nodes=2"])
    return job.job_from_config(parse.parse(node))


def stub(commands: Path, name: str, body: str) -> None:
    path = commands / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >>"{commands}/calls"\n{body}\n')
    path.chmod(0o755)


def calls(commands: Path) -> list[str]:
    return (commands / "calls").read_text().splitlines() if (commands / "calls").exists() else []


def attempt(run_dir: Path, job: str | None = "17", hosts: Sequence[str] = ("n1", "n2")) -> int:
    """Record the start of an attempt, as rank 0 of a job does."""
    run_dir.mkdir(parents=True, exist_ok=True)
    number = 1 + sum(event["event"] == "start" for event in attempt_log.read_events(run_dir))
    environ = {"SLURM_JOB_ID": job} if job else {}
    attempt_log.record_start(
        run_dir, number, environ=environ, launcher="srun", hosts=list(hosts), world_size=8, gpus_per_node=4
    )
    return number


def end(run_dir: Path, number: int, step: int, outcome: str, metrics: dict[str, float], why: str = "") -> None:
    """Record the end of an attempt, as rank 0 does."""
    attempt_log.record_end(run_dir, None, attempt=number, step=step, outcome=outcome, why=why, metrics=metrics)


def submit(folder: Path, commands: Path, work: job.Job, answer: str = "echo 17", to: str = "slurm") -> None:
    """Record a submission, as submit.py does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("name: digits\n")
    (folder / "job.sh").write_text("#!/bin/bash\n")
    stub(commands, scheduler.SUBMIT_COMMAND[to], answer)
    try:
        node = OmegaConf.create({"cluster": {"name": "here", "scheduler": to}})
        cfg: Any = SimpleNamespace(cluster=node.cluster, node=node)
        scheduler.submit_job(folder / "job.sh", cfg, job=work, folder=folder)
    finally:
        (commands / scheduler.SUBMIT_COMMAND[to]).unlink()
        (commands / "calls").unlink()


def raise_in(run_dir: Path, rank: int, error: Exception) -> None:
    """Record an error of a rank in the newest attempt, as its watchdog does."""
    newest = max(event["attempt"] for event in attempt_log.read_events(run_dir))
    said = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    causes.write_cause(
        run_dir,
        newest,
        rank=rank,
        host=f"n{rank // 4 + 1}",
        error=said,
        stack="".join(traceback.format_exception(error)),
    )


def written(run_dir: Path, minutes: float) -> None:
    """Set the modification time of all files to this many minutes before NOW."""
    for path in run_dir.rglob("*"):
        os.utime(path, (NOW - 60 * minutes,) * 2)


def beat(run_dir: Path, number: int, minutes: float) -> None:
    """Set an attempt's last heartbeat to this many minutes before NOW."""
    (run_dir / "claims").mkdir(exist_ok=True)
    (file := run_dir / "claims" / f"{number:06}.beat").touch()
    os.utime(file, (NOW - 60 * minutes,) * 2)


def rows(*places: Path) -> dict[str, dict[str, str]]:
    """Return the table by the columns of its title line: run → title → cell. `note`: the line on it below the table."""
    lines = run_table.format_runs(places)
    titles = lines[0].split()
    table: dict[str, dict[str, str]] = {}
    for line in lines[1:]:
        cells = re.split(" {2,}", line)
        if len(cells) == len(titles):
            table[cells[0]] = dict(zip(titles, cells, strict=True)) | {"note": ""}
        else:
            name, _, note = line.partition(": ")
            table[name]["note"] = note
    return table


def only(runs: Path) -> dict[str, str]:
    (row,) = rows(runs).values()
    return row


# -- Progress --


def test_a_finished_run_is_told_in_one_line(runs: Path, clock: Clock) -> None:
    clock(60)
    number = attempt(runs / "digits")
    clock(30)
    end(runs / "digits", number, 500, "finished", TESTED)
    assert run_table.format_runs([runs]) == [
        "run     job  state     attempts  nodes  step  metric              node-hours",
        "digits   17  finished         1      2   500  test/accuracy 0.91        1.00",
    ]


def test_attempts_are_summed_up(runs: Path, clock: Clock, commands: Path) -> None:
    stub(commands, "squeue", "echo '17 RUNNING None'")
    run_dir = runs / "digits"
    clock(300)
    end(run_dir, attempt(run_dir), 100, "continue", {})
    clock(240)
    attempt(run_dir, hosts=["n1"])  # killed an hour later, requeued after another
    beat(run_dir, 2, 180)
    clock(120)
    attempt(run_dir, hosts=["n1", "n2", "n3"])
    clock(0)
    row = only(runs)
    assert (row["attempts"], row["nodes"], row["step"]) == ("3", "3", "100")
    assert row["node-hours"] == "7.00", "0 of the first, 1 h of the second, 3 nodes x 2 h up to now"
    stub(commands, "squeue", "exit 0")
    beat(run_dir, 3, 90)
    assert only(runs)["node-hours"] == "2.50", "that one till its heart stopped"
    written(run_dir, 60)
    assert only(runs)["node-hours"] == "3.00", "what others have touched since then is no sign of the second"


def test_what_submitting_writes_is_no_sign_of_life(runs: Path, clock: Clock, commands: Path, work: job.Job) -> None:
    run_dir = runs / "digits"
    clock(120)
    attempt(run_dir)
    beat(run_dir, 1, 60)
    clock(0)
    submit(run_dir, commands, work, "echo 18")
    for name in ("job-18.log", "job.sh", "config.yaml", "submitted.json"):
        (run_dir / name).touch()
        os.utime(run_dir / name, (NOW, NOW))
    assert only(runs)["node-hours"] == "2.00"


def scalars(run_dir: Path, name: str, **steps: dict[str, float]) -> Path:
    """Write a file as TensorBoard's writers do: step → tag → value."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(run_dir / "tensorboard"))
    for step, values in steps.items():
        pairs = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        writer.add_event(Event(step=int(step[1:]), wall_time=1.0, summary=Summary(value=pairs)))
    writer.close()
    (made,) = (run_dir / "tensorboard").glob(f"*.{os.getpid()}.*")
    return made.rename(made.with_name(f"events.out.tfevents.{name}"))


def test_a_run_that_has_not_ended_is_read_from_tensorboard(runs: Path) -> None:
    run_dir = runs / "digits"
    attempt(run_dir)
    assert (only(runs)["step"], only(runs)["metric"]) == ("-", "-")
    scalars(run_dir, "1", s9={"train/loss": 2.0}, s20={"val/accuracy": 0.5, "val/loss": 1.0})
    newer = scalars(run_dir, "2", s39={"train/loss": 1.0}, s44={"lr": 0.1})
    assert (only(runs)["step"], only(runs)["metric"]) == ("44", "val/accuracy 0.5")
    newer.write_bytes(newer.read_bytes()[:-7])
    assert only(runs)["step"] == "39", "as far as it can be read"
    newer.write_bytes(b"\xff" * 100)
    assert only(runs)["step"] == "20"


def test_the_last_step_is_the_largest(runs: Path) -> None:
    run_dir = runs / "digits"
    attempt(run_dir)
    scalars(run_dir, "1", s90={"train/loss": 2.0}, s80={"val/loss": 1.0})
    assert only(runs)["step"] == "90"
    (run_dir / "checkpoints" / "step-000000100-002").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-000000120-002.part").mkdir()
    assert only(runs)["step"] == "100"


def test_what_the_last_end_says_goes_before_tensorboard(runs: Path) -> None:
    run_dir = runs / "digits"
    scalars(run_dir, "1", s41={"val/accuracy": 0.5})
    end(run_dir, attempt(run_dir), 40, "finished", TESTED)
    assert (only(runs)["step"], only(runs)["metric"]) == ("40", "test/accuracy 0.91")
    attempt(run_dir)
    assert (only(runs)["step"], only(runs)["metric"]) == ("41", "test/accuracy 0.91")


def test_what_a_run_has_validated_is_in_its_end(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a table of many runs reads no curves: it would take seconds for ten of them."""
    run_dir = runs / "digits"
    scalars(run_dir, "1", s41={"val/accuracy": 0.5})
    first, options = attempt(run_dir), {"step": 40, "outcome": "continue", "validated": {"val/accuracy": 0.75}}
    attempt_log.record_end(run_dir, None, attempt=first, **options)
    with monkeypatch.context() as context:
        context.setattr(
            latest_metric, "newest_step_and_validation_metrics", lambda *_, **__: pytest.fail("curves are read")
        )
        assert (only(runs)["step"], only(runs)["metric"]) == ("40", "val/accuracy 0.75")
    attempt(run_dir)
    assert only(runs)["metric"] == "val/accuracy 0.5", "of a run that goes on, the newest"


def test_a_metric_may_have_any_name(runs: Path) -> None:
    run_dir = runs / "digits"
    first = attempt(run_dir)
    (run_dir / "config.yaml").write_text("checkpoint:\n  keep: 2\n  monitor: quality\nfaults:\n  retries: 3\n")
    scalars(run_dir, "1", s41={"train_per": 0.5, "quality": 0.75})
    assert only(runs)["metric"] == "quality 0.75"
    (run_dir / "config.yaml").write_text("checkpoint:\n  monitor: null\n")
    assert only(runs)["metric"] == "-"
    scalars(run_dir, "2", s42={"train_per": 0.5, "val_per": 0.25})
    assert only(runs)["metric"] == "val_per 0.25"
    end(run_dir, first, 42, "finished", {"final_per": 0.125})
    assert only(runs)["metric"] == "final_per 0.125"


# -- Its state, without a scheduler --


def test_the_verdict_is_the_state(runs: Path) -> None:
    for name, outcome in enumerate(("finished", "failed", "continue")):
        end(runs / f"{name}", attempt(runs / f"{name}"), 5, outcome, {})
    assert [row["state"] for row in rows(runs).values()] == ["finished", "failed", "to be continued"]


def test_a_run_without_an_end_is_alive_while_its_heart_beats(runs: Path, clock: Clock) -> None:
    clock(60)
    attempt(runs / "digits", None)
    beat(runs / "digits", 1, 1.5)
    clock(1)
    assert (only(runs)["state"], only(runs)["node-hours"]) == ("running?", "1.95")
    clock(0)
    assert (only(runs)["state"], only(runs)["node-hours"]) == ("died", "1.95"), "no time beyond its last beat"


def test_submitted_or_not(runs: Path, commands: Path, work: job.Job, clock: Clock) -> None:
    run_dir = runs / "digits"
    clock(9)
    submit(run_dir, commands, work)
    assert (only(runs)["state"], only(runs)["job"], only(runs)["nodes"]) == ("submitted", "17", "2")
    clock(8)
    end(run_dir, attempt(run_dir), 5, "continue", {})
    clock(7)
    with pytest.raises(errors.ConfigError, match="invalid account"):
        submit(run_dir, commands, work, "echo 'sbatch: error: invalid account' >&2; exit 1")
    assert only(runs)["state"] == "to be continued"  # as before
    clock(6)
    attempt(run_dir, None)
    written(run_dir, 6)
    assert only(runs)["state"] == "running?"
    clock(5)
    end(run_dir, 2, 9, "finished", {})
    assert (only(runs)["state"], only(runs)["note"]) == ("finished", "")
    (run_dir / "submitted.json").unlink()
    for name in ("attempts.jsonl", "verdict"):
        (run_dir / name).unlink()
    assert only(runs)["state"] == "not submitted"


# -- Its state, with Slurm --


def test_the_run_that_a_job_waits_for_is_told(runs: Path, commands: Path, work: job.Job) -> None:
    submit(runs / "digits", commands, work)
    train, file = runs.parent / "train", runs / "digits" / "submitted.json"
    file.write_text(file.read_text().replace("{", f'{{"after": "{train}",', 1))
    stub(commands, "squeue", "echo '17 PENDING Dependency'")
    row = only(runs)
    assert (row["state"], row["note"]) == ("pending (Dependency)", f"it waits for {train}")
    stub(commands, "squeue", "echo '17 CANCELLED None'")
    assert only(runs)["note"] == f"it waited for {train}"
    number = attempt(train, job="16")
    end(train, number, 500, "failed", {})
    assert only(runs)["note"] == f"it waited for {train}, which failed"
    whole = file.read_text()
    file.write_text(whole.replace(f'"{train}"', "3", 1))
    assert only(runs)["state"] == "not submitted", "a damaged file counts as missing"
    file.write_text(whole.replace(f'"{train}"', r'"\u0000"', 1))
    assert only(runs)["note"].startswith("it waited for")
    file.write_text(whole)
    attempt(runs / "digits")  # it has started: other reasons count from now on
    assert only(runs)["note"] == ""


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("17 PENDING Resources", "pending (Resources)"),
        ("17 PENDING launch failed requeued held", "pending (launch failed requeued held)"),
        ("17 PENDING None", "pending"),
        ("17 RUNNING None", "running"),
        ("17 COMPLETING None", "completing"),
        ("17 TIMEOUT TimeLimit", "timeout"),
        ("17 OUT_OF_MEMORY OutOfMemory", "out of memory"),
        ("17 CANCELLED None", "cancelled"),
    ],
)
def test_squeue_is_asked_once_for_all(
    line: str, state: str, runs: Path, commands: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "gpu")  # a person's own view of the queue
    attempt(runs / "digits")
    clock(5)
    attempt(runs / "older", "9")
    end(runs / "of_yesterday", attempt(runs / "of_yesterday", "3"), 5, "finished", {})
    told = f"echo '{line}'\necho '9 RUNNING None'\necho '99 RUNNING None'"
    stub(commands, "squeue", f'[ -z "$SQUEUE_PARTITION" ] || exit 0\n{told}')
    stub(commands, "sacct", "exit 0")
    found = rows(runs)
    assert (found["digits"]["state"], found["older"]["state"]) == (state, "running")
    mine = f"--user={os.getuid()}"
    assert calls(commands) == [f"squeue --noheader --array --states=all --format=%i %T %r {mine} --jobs=17,9"]


def test_a_job_that_is_forgotten_does_not_hide_the_others(runs: Path, commands: Path, clock: Clock) -> None:
    attempt(runs / "digits")
    clock(15)
    attempt(runs / "older", "9")
    clock(0)
    forgotten = 'case "$*" in *--jobs*) echo "squeue: error: Invalid job id specified" >&2; exit 1;; esac'
    stub(commands, "squeue", f"{forgotten}\necho '17 RUNNING None'")
    assert [row["state"] for row in rows(runs).values()] == ["died", "running"]
    assert calls(commands)[1].endswith(f"--user={os.getuid()}")


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("17|FAILED|1:0", "failed (exit code 1)"),
        ("17|FAILED|0:9", "failed (signal 9)"),
        ("17|TIMEOUT|0:0", "timeout"),
        ("17|CANCELLED by 1000|0:0", "cancelled"),
        ("17|COMPLETED|0:0", "completed"),
        ("9|FAILED|1:0", "died"),
        ("", "died"),
    ],
)
def test_accounts_tell_what_squeue_has_forgotten(
    line: str, state: str, runs: Path, commands: Path, clock: Clock
) -> None:
    clock(15)
    attempt(runs / "digits")
    clock(0)
    stub(commands, "squeue", "exit 0")
    stub(commands, "sacct", f"echo '{line}'")
    assert only(runs)["state"] == state
    assert calls(commands)[1] == f"sacct -n -X -P -o JobID,State,ExitCode --user={os.getuid()} -j 17"


def test_a_run_of_an_unknown_scheduler_is_looked_up_in_that_of_this_machine(runs: Path, commands: Path) -> None:
    attempt(runs / "digits")
    (run,) = history.find_runs(runs / "digits")
    stub(commands, "qstat", "exit 1")
    assert run_table.scheduler_of_run(run) == "pbs"
    stub(commands, "squeue", "exit 0")
    assert run_table.scheduler_of_run(run) == "slurm"
    (runs / "digits" / "config.yaml").write_text("cluster:\n  name: here\n  scheduler: pbs\n")
    assert run_table.scheduler_of_run(run) == "pbs", "a rendered script was given to qsub where there is a squeue, too"


def test_a_site_without_accounts(runs: Path, commands: Path, clock: Clock) -> None:
    clock(15)
    attempt(runs / "digits")
    clock(0)
    stub(commands, "squeue", "exit 0")
    stub(commands, "sacct", "echo '17|RUNNING|0:0'; echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert only(runs)["state"] == "died"


def test_the_verdict_is_more_certain_than_the_end_of_the_job(runs: Path, commands: Path, clock: Clock) -> None:
    stub(commands, "squeue", "echo '17 TIMEOUT TimeLimit'")
    clock(5)
    end(runs / "digits", attempt(runs / "digits"), 5, "continue", {})
    assert only(runs)["state"] == "to be continued"
    stub(commands, "squeue", "echo '17 PENDING BeginTime'")
    assert only(runs)["state"] == "pending (BeginTime)"
    (runs / "digits" / "verdict").unlink()  # removed by the next attempt, which then crashed early
    stub(commands, "squeue", "echo '17 FAILED NonZeroExitCode'")
    assert only(runs)["state"] == "failed"


@pytest.mark.parametrize("number", ["17", "18"])
def test_a_run_whose_next_start_was_rejected(
    number: str, runs: Path, commands: Path, work: job.Job, clock: Clock
) -> None:
    """Check that a rejected start is reported although the earlier verdict stays.

    Slurm has requeued the job under the same number, or it was submitted once more.
    """
    run_dir = runs / "digits"
    clock(9)
    submit(run_dir, commands, work)
    clock(8)
    end(run_dir, attempt(run_dir, "17"), 5, "continue", {})
    clock(7)
    if number == "18":
        submit(run_dir, commands, work, "echo 18")
    stub(commands, "squeue", "exit 0")
    stub(commands, "sacct", f"echo '{number}|FAILED|2:0'")
    said = "ConfigError: trainer.devices=4: 0 CUDA devices are visible.\n  Try: x\n"
    (run_dir / f"job-{number}.log").write_text(said)
    assert [only(runs)[key] for key in ("job", "state")] == [number, "failed (exit code 2)"]
    assert only(runs)["note"] == "ConfigError: trainer.devices=4: 0 CUDA devices are visible."


def test_what_was_submitted_last_counts(runs: Path, commands: Path, work: job.Job, clock: Clock) -> None:
    run_dir = runs / "digits"
    clock(60)
    attempt(run_dir)
    raise_in(run_dir, 0, ValueError("long ago"))
    clock(5)
    submit(run_dir, commands, work, "echo 18")
    stub(commands, "squeue", "echo '17 FAILED NonZeroExitCode'; echo '18 PENDING Priority'")
    assert [only(runs)[key] for key in ("job", "state", "note")] == ["18", "pending (Priority)", ""]
    stub(commands, "squeue", "echo '18 CANCELLED None'")
    assert [only(runs)[key] for key in ("job", "state", "note")] == ["18", "cancelled", ""]
    stub(commands, "squeue", "echo '17 FAILED NonZeroExitCode'")
    assert [only(runs)[key] for key in ("job", "state", "note")] == ["18", "unknown (squeue does not know its job)", ""]
    end(run_dir, attempt(run_dir, "18"), 5, "finished", {})
    assert [only(runs)[key] for key in ("job", "state", "note")] == ["18", "finished", ""]


def test_a_finished_run_that_is_submitted_again(runs: Path, commands: Path, work: job.Job, clock: Clock) -> None:
    run_dir = runs / "digits"
    clock(60)
    end(run_dir, attempt(run_dir), 5, "finished", {})
    clock(5)
    with pytest.raises(errors.ConfigError, match="nothing is queued"):
        submit(run_dir, commands, work, "echo no >&2; exit 1")
    assert (only(runs)["state"], only(runs)["note"]) == ("finished", "")
    submit(run_dir, commands, work, "echo 18")
    stub(commands, "squeue", "echo '18 PENDING Priority'")
    assert (only(runs)["job"], only(runs)["state"]) == ("18", "pending (Priority)")


@pytest.mark.parametrize("name", ["squeue", "qstat"])
def test_a_scheduler_that_does_not_answer_is_named(name: str, runs: Path, commands: Path) -> None:
    attempt(runs / "digits")
    written(runs, 1)
    stub(commands, name, "echo 'fatal: Could not establish a configuration source' >&2; exit 1")
    *_, row, last = run_table.format_runs([runs])
    assert "running?" in row and last.startswith(f"{name} does not answer")


def test_a_scheduler_that_hangs_is_not_waited_for(runs: Path, commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(runs / "digits")
    stub(commands, "squeue", "exec /bin/sleep 60")
    monkeypatch.setattr(job_states, "TIMEOUT_SECONDS", 0.2)
    begun = time.perf_counter()
    assert run_table.format_runs([runs])[-1].startswith("squeue does not answer")
    assert len(calls(commands)) == 1 and time.perf_counter() - begun < 60


def sweep(runs: Path, commands: Path, work: job.Job, answer: str, to: str = "slurm") -> list[Path]:
    folder = runs / "2026-11-21_sweep"
    members = [folder / f"{number}_seed={number}" for number in range(11)]
    for member in members:
        member.mkdir(parents=True)
        (member / "config.yaml").write_text("name: digits\n")
        (member / "job.sh").write_text("#!/bin/bash\n")
    (folder / "members").write_text("".join(f"/moved/since/{member.name}\n" for member in members))
    submit(folder, commands, work, answer, to)
    (folder / "config.yaml").unlink()
    return members


def test_members_of_an_array_have_states_of_their_own(runs: Path, commands: Path, work: job.Job, clock: Clock) -> None:
    clock(30)
    members = sweep(runs, commands, work, "echo 18")
    clock(20)
    attempt(members[3], "18_3")
    (members[0].parent / "job-18_3.log").write_text("srun: error: n1: task 0: Killed\n")
    clock(0)
    attempt(runs / "later")
    stub(commands, "squeue", "echo '18_2 RUNNING None'; echo '18_10 PENDING Resources'; echo '18_3 FAILED None'")
    found = rows(runs)
    assert list(found) == [*(f"2026-11-21_sweep/{member.name}" for member in members), "later"]
    chosen = [found[f"2026-11-21_sweep/{members[number].name}"] for number in (2, 10, 3, 4)]
    assert [row["job"] for row in chosen] == ["18_2", "18_10", "18_3", "18_4"]
    assert [row["state"] for row in chosen] == [
        "running",
        "pending (Resources)",
        "failed",
        "unknown (squeue does not know its job)",
    ]
    assert chosen[2]["note"] == "srun: error: n1: task 0: Killed"
    assert calls(commands)[0].endswith("--jobs=17,18")
    assert rows(members[2])[members[2].name]["state"] == "running", "named alone"
    assert len(rows(members[0].parent)) == 11, "the sweep alone"


def test_runs_that_share_a_node_have_states_of_their_own(
    runs: Path, commands: Path, work: job.Job, clock: Clock
) -> None:
    clock(60)
    members = sweep(runs, commands, replace(work, runs_per_node=4), "echo 18")
    clock(50)
    for number in range(6):
        attempt(members[number], f"18_{number // 4}", hosts=["n1"])
    clock(20)
    end(members[0], 1, 9, "finished", {})
    end(members[1], 1, 5, "failed", {}, "ValueError: no")
    end(members[4], 1, 5, "continue", {}, "requested by USR2")
    ended = {1: "18_0 failed", 2: "18_0 continue", 4: "18_1 continue", 5: "18_1 failed"}
    for number, text in ended.items():
        (members[number] / "ended").write_text(f"{text}\n")
    clock(0)

    def states() -> list[str]:
        found = rows(runs)
        cells = [found[f"2026-11-21_sweep/{member.name}"] for member in members]
        assert [row["job"] for row in cells] == [f"18_{number // 4}" for number in range(11)]
        return [row["state"] for row in cells]

    stub(commands, "squeue", 'for job in 18_0 18_1 18_2; do echo "$job ${STATE:-RUNNING} None"; done')
    stops = ["to be continued (requested by USR2)", "failed"]
    expected = ["finished", "failed", "to be continued", "running", *stops, *["running"] * 5]
    assert states() == expected
    stub(commands, "squeue", 'for job in 18_0 18_1 18_2; do echo "$job PENDING BeginTime"; done')
    pending = "pending (BeginTime)"
    assert states() == ["finished", "failed", pending, pending, pending, "failed", *[pending] * 5]
    assert float(rows(runs)[f"2026-11-21_sweep/{members[0].name}"]["node-hours"]) == pytest.approx(0.5 / 4, abs=0.01)


def test_the_error_of_a_run_that_shares_its_node_is_in_its_own_log(runs: Path) -> None:
    (runs / "a").mkdir()
    (runs / "job-18_0.log").write_text("slurmstepd: error: *** JOB 18 ON n1 CANCELLED AT x DUE TO TIME LIMIT ***\n")
    log = runs / "a" / "job-18_0.log"
    requeued = "job 18_0: not finished (exit code 1), so it is requeued when the other runs on this node have ended"
    log.write_text(f"0: ConfigError: the first start\n{requeued}\n0: ConfigError: the second start\n")
    assert job_logs.first_logged_error(runs / "a", "18_0") == "ConfigError: the second start"
    log.unlink()
    assert "TIME LIMIT" in job_logs.first_logged_error(runs / "a", "18_0")


@pytest.mark.parametrize("name", ["squeue", "qstat"])
def test_a_scheduler_that_does_not_know_the_job_does_not_end_a_run(
    name: str, runs: Path, commands: Path, work: job.Job, clock: Clock
) -> None:
    """Check the view from another cluster with the same file system, whose scheduler never heard of the job."""
    scheduler_name = {"squeue": "slurm", "qstat": "pbs"}[name]
    clock(120)
    submit(runs / "waits", commands, work, "echo 18", scheduler_name)
    submit(runs / "runs", commands, work, "echo 19", scheduler_name)
    clock(100)
    attempt(runs / "runs", "19")
    clock(0)
    stub(commands, "squeue", "exit 0")
    stub(commands, "sacct", "exit 0")
    stub(commands, "qstat", qstat({}))
    for minutes, state in {0: "running?", 0.5: "running?", -0.1: "running?", 1.5: "died"}.items():
        beat(runs / "runs", 1, minutes)
        states = {row["run"]: row["state"] for row in rows(runs).values()}
        assert states == {"waits": f"unknown ({name} does not know its job)", "runs": state}


# -- Its state, with PBS --


FORGOTTEN = "unknown (qstat does not know its job)"


@pytest.mark.parametrize(
    ("said", "state", "note"),
    [
        ({"job_state": "R", "comment": "Job run at Sat on (p1:ncpus=4)"}, "running", ""),
        ({"job_state": "H"}, "pending", ""),
        ({"job_state": "Q", "comment": "Not Running: too busy"}, "pending (Not Running: too busy)", ""),
        ({"job_state": "Q", "comment": "Can Never Run: " + "ngpus " * 9}, "pending", "Can Never Run: " + "ngpus " * 9),
        ({"job_state": "F", "Exit_status": 1}, "failed (exit code 1)", ""),
        ({"job_state": "F", "Exit_status": -29}, "timeout", ""),
        ({"job_state": "F", "Exit_status": 85}, "to be continued", ""),
        ({"job_state": "F", "Exit_status": 271}, "cancelled (by qdel, or PBS lost a node)", ""),
        ({"job_state": "F"}, "cancelled", ""),
    ],
)
def test_qstat_tells(said: dict, state: str, note: str, runs: Path, commands: Path, work: job.Job) -> None:
    submit(runs / "digits", commands, work, "echo 17.pbsctl", "pbs")
    stub(commands, "qstat", qstat({"17.pbsctl": said}))
    stub(commands, "squeue", "exit 1")  # squeue exists, but does not manage this job
    row = only(runs)
    assert (row["state"], row["note"]) == (state, note.strip())
    assert calls(commands) == ["qstat -x -t -f -F dsv 17"]


def test_pbs_without_history_and_without_the_job(runs: Path, commands: Path, work: job.Job, clock: Clock) -> None:
    submit(runs / "digits", commands, work, "echo 17.pbsctl", "pbs")
    stub(commands, "qstat", qstat({"17.pbsctl": {"job_state": "R"}}, history=False))
    assert only(runs)["state"] == "running"
    clock(15)
    attempt(runs / "digits")
    clock(0)
    stub(commands, "qstat", qstat({}, history=False))
    assert only(runs)["state"] == "died"


def test_of_several_jobs_of_pbs_each_is_told(runs: Path, commands: Path, work: job.Job) -> None:
    """Check that each of several jobs is reported, although some versions print only the first as JSON.

    An unknown job must not hide the others.
    """
    variables = {"A": "a|b", "B": 'say "hi" \\', "C": "Job Id: 9"}
    told = {"Variable_List": variables, "comment": "Not Running: a|b"}
    for number in (9, 10, 11):
        submit(runs / f"{number}", commands, work, f"echo {number}.pbsctl", "pbs")
    jobs = {"9.pbsctl": told | {"job_state": "R"}, "11.pbsctl": told | {"job_state": "Q"}}
    for kept in (True, False):
        stub(commands, "qstat", qstat(jobs, history=kept))
        found = {name: row["state"] for name, row in rows(runs).items()}
        assert found == {"9": "running", "10": FORGOTTEN, "11": "pending (Not Running: a|b)"}


def test_the_job_of_another_user_is_not_ours(runs: Path, commands: Path, work: job.Job, clock: Clock) -> None:
    """Check the owner of a job: the same id may be another user's job.

    This happens on another cluster, or when the scheduler restarts its numbering.
    """
    submit(runs / "digits", commands, work, "echo 17.pbsctl", "pbs")
    stub(commands, "qstat", qstat({"17.pbsctl": {"job_state": "R", "Job_Owner": "ben@login1"}}))
    assert only(runs)["state"] == FORGOTTEN
    clock(15)
    attempt(runs / "by_slurm", "18")
    clock(0)
    (commands / "qstat").unlink()
    for name, line in {"squeue": "18 RUNNING None", "sacct": "18|RUNNING|0:0"}.items():
        stub(commands, name, f'case "$*" in *--user={os.getuid()}*) ;; *) echo "{line}";; esac')
    (runs / "digits" / "submitted.json").unlink()
    assert rows(runs / "by_slurm")["by_slurm"]["state"] == "died"


def test_a_chain_shows_the_job_that_is_on(runs: Path, commands: Path, work: job.Job) -> None:
    # The first qsub of the chain has no dependency; each other depends on the job before.
    count = 'case "$*" in *:17.*) echo 18.pbsctl;; *:18.*) echo 19.pbsctl;; *) echo 17.pbsctl;; esac'
    submit(runs / "digits", commands, replace(work, chain=3), count, "pbs")
    end(runs / "digits", attempt(runs / "digits"), 5, "continue", {})
    told = {"17.pbsctl": {"job_state": "F", "Exit_status": 85}, "19.pbsctl": {"job_state": "H"}}
    stub(commands, "qstat", qstat(told | {"18.pbsctl": {"job_state": "R"}}))
    row = only(runs)
    assert (row["job"], row["state"]) == ("18", "running")
    assert calls(commands) == ["qstat -x -t -f -F dsv 17 18 19"]


def test_members_of_a_pbs_array(runs: Path, commands: Path, work: job.Job) -> None:
    members = sweep(runs, commands, work, "echo 29[].pbsctl", "pbs")
    told = {"29[].pbsctl": {"job_state": "B"}, "29[2].pbsctl": {"job_state": "R"}}
    stub(commands, "qstat", qstat(told | {"29[10].pbsctl": {"job_state": "X", "Exit_status": 3}}))
    (members[10] / "job-29.log").write_text("job.sh: error: asked for 2 nodes, PBS gave p1: each chunk needs ...\n")
    found = list(rows(runs).values())
    assert [row["state"] for row in found[1:3]] == [FORGOTTEN, "running"]
    assert (found[10]["job"], found[10]["state"]) == ("29[10]", "failed (exit code 3)")
    assert found[10]["note"].startswith("job.sh: error: asked for 2 nodes")
    assert calls(commands) == ["qstat -x -t -f -F dsv 29[]"]


def test_a_job_that_the_job_itself_has_queued(runs: Path, commands: Path, work: job.Job, clock: Clock) -> None:
    """Check the jobs that job.sh notes in `successors`: pending, started, in an attempt, or deleted."""
    run_dir = runs / "digits"
    clock(60)
    submit(run_dir, commands, work, "echo 17.pbsctl", "pbs")
    clock(50)
    attempt(run_dir, "17")
    beat(run_dir, 1, 30)
    (run_dir / "successors").write_text(f"{NOW - 1800:.0f} 18.pbsctl\n")
    clock(0)
    killed = {"17.pbsctl": {"job_state": "F", "Exit_status": 137}}
    expected = {"Q": "pending", "H": "pending", "R": "running"}
    for state, word in expected.items():
        stub(commands, "qstat", qstat(killed | {"18.pbsctl": {"job_state": state}}))
        assert [only(runs)[key] for key in ("job", "state")] == ["18", word]
        assert only(runs)["node-hours"] == "0.67", "the first attempt lasted until its heart stopped"
    stub(commands, "qstat", qstat(killed | {"18.pbsctl": {"job_state": "F"}}))
    assert [only(runs)[key] for key in ("job", "state")] == ["18", "cancelled"], "before it could start"
    attempt(run_dir, "18")
    (run_dir / "successors").open("a").write("of somebody\n18 \n")
    stub(commands, "qstat", qstat(killed | {"18.pbsctl": {"job_state": "F", "Exit_status": 1}}))
    assert [only(runs)[key] for key in ("job", "state", "attempts")] == ["18", "failed (exit code 1)", "2"]


# -- The first cause --


def test_the_rank_that_raised_first_is_told(runs: Path, clock: Clock) -> None:
    run_dir = runs / "digits"
    clock(60)
    attempt(run_dir)
    clock(50)
    raise_in(run_dir, 0, RuntimeError("gloo: connection closed by peer"))
    clock(51)
    raise_in(run_dir, 3, ValueError("the loss is \x1b[31mnan\nand more"))
    (run_dir / "errors" / "1" / "rank-5.txt").write_text("half a li")
    clock(0)
    assert only(runs)["note"] == "rank 3 on n1: ValueError: the loss is [31mnan"
    assert only(runs)["state"] == "failed"
    clock(40)
    attempt(run_dir)
    clock(0)
    assert only(runs)["note"] == "", "it was another attempt"
    clock(10)
    raise_in(run_dir, 1, errors.ConfigError("ckpt", "x.ckpt", "there is no such file", "ckpt=..."))
    clock(0)
    assert only(runs)["note"] == "rank 1 on n1: ConfigError: ckpt=x.ckpt: there is no such file."


def test_the_original_is_told_not_its_echoes(runs: Path, clock: Clock) -> None:
    run_dir = runs / "digits"
    attempt(run_dir)
    hang = type("Hang", (Exception,), {})
    clock(9)
    raise_in(
        run_dir, 0, hang("no step for 60 s since step 12 (training); waits for other ranks (in x.py:1 all_reduce)")
    )
    clock(8)
    raise_in(run_dir, 4, type("Ended", (Exception,), {})("rank 0 is gone: Connection reset by peer"))
    clock(7)
    raise_in(run_dir, 2, type("DistNetworkError", (Exception,), {})("failed to recv, got 0 bytes"))
    clock(0)
    assert only(runs)["note"] == "rank 1 on n1 ended without an error, as did 4 more (killed?)"
    for rank in (1, 3, 6, 7):
        raise_in(run_dir, rank, RuntimeError("[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [n1]"))
    assert only(runs)["note"] == "rank 5 on n2 ended without an error (killed?)"
    raise_in(run_dir, 5, hang("no step for 60 s since step 12 (training); stuck in data.py:40 load"))
    assert only(runs)["note"].startswith(
        "rank 5 on n2: Hang: no step for 60 s since step 12 (training); stuck in data.py"
    )
    assert only(runs)["state"] == "failed"


def test_only_the_newest_attempt_counts_even_before_it_has_begun(runs: Path) -> None:
    run_dir = runs / "digits"
    attempt(run_dir)
    raise_in(run_dir, 0, ValueError("of the first"))
    (run_dir / "claims").mkdir()
    (run_dir / "claims" / "000001.json").touch()
    assert only(runs)["note"].endswith("of the first")
    (run_dir / "claims" / "000002.json").touch()
    assert only(runs)["note"] == ""
    causes.write_cause(run_dir, 2, rank=3, host="n1", error="KeyError: 'of the second'", stack="Traceback")
    assert only(runs)["note"] == "rank 3 on n1: KeyError: 'of the second'", "while it was building"


def test_why_it_is_to_be_continued(runs: Path) -> None:
    end(runs / "digits", attempt(runs / "digits"), 5, "continue", {}, "SIGUSR1")
    assert only(runs)["state"] == "to be continued (SIGUSR1)"
    attempt_log.write_verdict(runs / "digits", 1, step=5, outcome="failed", why="rank 1: ValueError:\nno")
    assert (only(runs)["state"], only(runs)["note"]) == ("failed", "rank 1: ValueError: no")


def test_a_run_that_gave_up(runs: Path, commands: Path, work: job.Job, clock: Clock) -> None:
    run_dir = runs / "digits"
    clock(9)
    attempt(run_dir)
    (run_dir / "job.sh").touch()
    (run_dir / "config.yaml").write_text("name: digits\nfaults:\n  nonfinite: stop\n  retries: 3\nlogger: {}\n")
    (run_dir / "stalled").write_text("2\n")
    written(run_dir, 9)
    beat(run_dir, 1, 0.5)
    clock(0)
    assert only(runs)["state"] == "running?"
    (run_dir / "stalled").write_text("3\n")
    written(run_dir, 8)
    clock(8)
    raise_in(run_dir, 0, OSError("stale file handle"))
    clock(0)
    assert only(runs)["state"] == "given up (3 starts without a newer checkpoint)"
    assert only(runs)["note"] == "rank 0 on n1: OSError: stale file handle"
    stub(commands, "squeue", "echo '17 PENDING BeginTime'")
    assert only(runs)["state"] == "pending (BeginTime)"
    (commands / "squeue").unlink()
    clock(5)
    config_text = (run_dir / "config.yaml").read_text()
    submit(run_dir, commands, work, "echo 18")
    (run_dir / "config.yaml").write_text(config_text)
    assert only(runs)["state"] == "submitted", "once more, by hand"


REJECTED = "0: ConfigError: trainer.devices=4: 0 CUDA devices are visible.\n3: something\n0:   Try: ...\n"
TRACEBACK = "12: Traceback (most recent call last):\n 3: hello\n12:   File 'x.py', line 1\n12:\n12: KeyError: 'a'\n"
KILLED = "slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2026-11-21T09:00:00 DUE TO"


@pytest.mark.parametrize(
    ("log", "note"),
    [
        (f"Epoch 1\n{REJECTED}{TRACEBACK}", "ConfigError: trainer.devices=4: 0 CUDA devices are visible."),
        ("ConfigError: --wait\n", "ConfigError: --wait"),
        (f"Epoch 1\rEpoch 2\n{TRACEBACK}srun: error: n1: task 12: Exited\n", "KeyError: 'a'"),
        ("[rank0]: Traceback (most recent call last):\n[rank0]:   File\n[rank0]: OSError: no\n", "OSError: no"),
        ("Traceback (most recent call last):\n  File", "Traceback (most recent call last):"),
        ("srun: error: n1: task 3: Killed\n", "srun: error: n1: task 3: Killed"),
        ("srun: error: n1: task 0: Exited with exit code 2\n0: ConfigError: a=1\n", "ConfigError: a=1"),
        (f"{KILLED} TIME LIMIT ***\n{TRACEBACK}", f"{KILLED} TIME LIMIT ***"),
        (f"{KILLED} TIME LIMIT ***\n", f"{KILLED} TIME LIMIT ***"),
        (f"{KILLED} JOB REQUEUE ***\n", ""),
        (f"srun: error: a\n{KILLED} JOB REQUEUE ***\nsrun: error: b\n", "srun: error: b"),
        ("all is well; srun: errors are rare\n", ""),
    ],
)
def test_the_log_tells_what_no_rank_could(log: str, note: str, runs: Path, clock: Clock) -> None:
    clock(60)
    attempt(runs / "digits")
    clock(0)
    (runs / "digits" / "job-17.log").write_text(log)
    (runs / "digits" / "job-16.log").write_text("srun: error: of an earlier job\n")
    assert (only(runs)["state"], only(runs)["note"]) == ("died", note)


def test_a_run_that_is_well_has_no_error_from_its_log(runs: Path, commands: Path) -> None:
    attempt(runs / "digits")
    (runs / "digits" / "job-17.log").write_text("slurmstepd: error: couldn't chdir\n")
    stub(commands, "squeue", "echo '17 RUNNING None'")
    assert only(runs)["note"] == ""
    raise_in(runs / "digits", 2, ValueError("no"))
    assert only(runs)["note"] == "rank 2 on n1: ValueError: no", "the others may not have seen it yet"


# -- Other files in the folder --


def test_no_run_at_all(tmp_path: Path) -> None:
    assert run_table.format_runs([tmp_path / "runs"]) == [
        f"There is no run in {tmp_path / 'runs'} yet. Try: python train.py, or python submit.py"
    ]


DAMAGE = {
    "attempts.jsonl": ['{"event": "sta', "[1]\n3\nnull\n", '{"event": "start"}\n', '{"event": "start", "time": "x"}\n'],
    "submitted.json": ["", "{", "[]", "17", '{"time": null}', '{"time": 1, "jobs": 17}', '{"time": 1, "jobs": null}'],
    "verdict": ["", "attempt 1\n", "outcome \n", "outcome strange\n"],
    "errors/1/rank-0.txt": ["", "x\n", "12", "ValueError: x\n"],
    "tensorboard/events.out.tfevents.1": ["", "x" * 99],
    "claims/000001.json": ["", "[]"],
    "stalled": ["", "many", "-1"],
    "job-17.log": ["", "Traceback (most recent call last):", "ConfigError:"],
}
DAMAGE["attempts.jsonl"] += [
    '{"event": "start", "time": 1, "hosts": null, "attempt": 1}\n',
    '{"event": "start", "time": 1, "world_size": "x", "attempt": 1}\n',
    '{"event": "start", "time": 1, "attempt": []}\n',
    '{"event": "start", "time": 1, "attempt": 1}\n{"event": "end", "time": 2, "attempt": 1, "metrics": null}\n',
    '{"event": "start", "time": 1, "attempt": 1}\n'
    '{"event": "end", "time": 2, "attempt": 1, "metrics": {"test/a": null}}\n',
]


@pytest.mark.parametrize(("file", "text"), [(file, text) for file, texts in DAMAGE.items() for text in texts])
def test_damaged_files_count_as_missing(file: str, text: str, runs: Path, commands: Path, work: job.Job) -> None:
    run_dir = runs / "digits"
    submit(run_dir, commands, work)
    attempt(run_dir)
    (run_dir / file).parent.mkdir(parents=True, exist_ok=True)
    (run_dir / file).write_text(text)
    assert only(runs)["run"] == "digits"
    (run_dir / file).write_bytes(b"\xff\xfe" + text.encode())
    assert only(runs)["run"] == "digits"
    (run_dir / file).unlink()
    (run_dir / file).mkdir()
    assert only(runs)["run"] == "digits"


def test_a_line_that_was_cut_short_takes_no_others_with_it(runs: Path) -> None:
    attempt(runs / "digits")
    with (runs / "digits" / "attempts.jsonl").open("a") as stream:
        stream.write('{"event": "sta')
    assert only(runs)["attempts"] == "1"


def test_what_is_no_run_is_passed_over(runs: Path) -> None:
    attempt(runs / "digits")
    (runs / "empty").mkdir()
    (runs / "a_file").write_text("x")
    (runs / "foreign" / "sub" / "subsub").mkdir(parents=True)
    (runs / "foreign" / "config.yaml").write_text("a: 1\n")
    (runs / "broken").symlink_to("nowhere")
    (runs / "loop").symlink_to("loop")
    assert list(rows(runs)) == ["digits"]
    assert run_table.format_runs([runs, runs / "empty", runs / "nothing"])[:2] == [
        f"{runs / 'empty'}: there is no run",
        f"{runs / 'nothing'}: there is no run",
    ]


def test_lines_fit_a_terminal(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("short", "x" * 90):
        end(runs / name, attempt(runs / name), 5, "finished", TESTED)
    (*_, whole) = run_table.format_runs([runs])
    assert whole.startswith("x" * 90 + "   17 "), "nothing is wrapped in a pipe"
    console = Console(file=StringIO(), force_terminal=True, color_system=None, width=100)
    monkeypatch.setattr(run_table, "make_console", lambda: console)
    lines = run_table.format_runs([runs])
    assert max(map(len, lines)) <= 100
    assert "".join(line.split()[0] for line in lines[2:]) == "x" * 90, "a name is cut into lines"
    assert all(
        line.split()[1:] == ["17", "finished", "1", "2", "5", "test/accuracy", "0.91", "0.00"] for line in lines[1:3]
    )


@pytest.mark.parametrize("name", ["[bold red]x[/]", "[/]", ":smile:", "\\[x]", "größe 漢字", "[link=http://x]y"])
def test_a_name_is_no_markup(name: str, runs: Path) -> None:
    name = name.replace("/", "∕")
    end(runs / name, attempt(runs / name), 5, "finished", TESTED)
    assert run_table.format_runs([runs])[1].startswith(f"{name}  ")


def test_a_name_that_the_terminal_cannot_show(runs: Path, commands: Path) -> None:
    for name in ("漢字", os.fsdecode(b"caf\xe9"), "\x1b[31mred"):
        end(runs / name, attempt(runs / name), 5, "finished", TESTED)
    for encoding in ("ascii", "utf-8"):
        environ = {"PATH": str(commands), "PYTHONIOENCODING": encoding}
        command = [sys.executable, str(PROJECT / "report.py"), str(runs)]
        done = subprocess.run(command, capture_output=True, env=environ)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"\x1b" not in done.stdout and len(done.stdout.splitlines()) == 4


# -- The command line --


def test_the_command_answers_at_once_and_without_torch(runs: Path, commands: Path) -> None:
    for number in range(20):
        run_dir = runs / f"größe {number}"
        end(run_dir, attempt(run_dir, f"{number}"), 5, ["finished", "continue"][number % 2], TESTED)
    stub(commands, "squeue", "exit 0")
    run_table.format_runs([runs])
    assert len(calls(commands)) == 1  # one question to the scheduler, for all runs
    code = f"""
import runpy, sys
sys.path.insert(0, {str(PROJECT)!r})
sys.argv = ["report.py", {str(runs)!r}]
runpy.run_path({str(PROJECT / "report.py")!r}, run_name="__main__")
assert not sys.modules.keys() & {{"torch", "lightning", "tensorboard", "plotly", "omegaconf"}}, "slow imports"
"""
    environ = {"PATH": str(commands), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=runs)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 21


def test_a_run_that_has_to_be_read_from_tensorboard_needs_no_torch_either(runs: Path) -> None:
    attempt(runs / "digits")
    scalars(runs / "digits", "1", s9={"val/loss": 2.0})
    code = f"""
import runpy, sys
sys.path.insert(0, {str(PROJECT)!r})
sys.argv = ["report.py", {str(runs / "digits")!r}]
runpy.run_path({str(PROJECT / "report.py")!r}, run_name="__main__")
assert "tensorboard" in sys.modules and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert "val/loss 2" in done.stdout


def test_by_default_it_looks_into_runs() -> None:
    done = subprocess.run([sys.executable, "report.py"], cwd=PROJECT, capture_output=True, text=True, env={"PATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("run ") or f"There is no run in {PROJECT / 'runs'} yet" in done.stdout
