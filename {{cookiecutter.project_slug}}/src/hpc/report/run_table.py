"""What ran and how: from run directories, and the scheduler where there is one, to a table. Imports no torch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from hpc.jobs import job_states
from hpc.jobs.job_states import State
from hpc.run import history, last_alive
from hpc.run.history import RunRecord

WIDTH = 120  # columns of a terminal
SHORT = 40  # characters of a reason that still fit behind the state
RECENT = 600  # seconds: a run without a heartbeat that wrote something since then is probably alive
OUTCOMES = {"finished": "finished", "continue": "to be continued", "failed": "failed"}
ACTIVE = {"running", "completing", "running?"}  # states in which a run goes on
REJECTED = State("failed", "exit code 2")
WELL = {"finished", "to be continued", "completed", "submitted", "not submitted", "running?"}


@dataclass(frozen=True)
class Row:
    """A run as a person wants to see it."""

    run: str
    job: str
    state: str
    attempts: int
    nodes: int | None
    step: int | None
    metric: str
    node_hours: float
    note: str  # why it waits or what went wrong first


def lines(places: Sequence[Path]) -> list[str]:
    """The table of all runs at or below these places, newest last."""
    found = {place: history.find_runs(place) for place in places}
    runs = [run for some in found.values() for run in some]
    runs.sort(key=lambda run: (run.submit_time or run.stale_before, run.path.parent, run.index))
    if not runs:
        return [f"no run in {' '.join(map(str, places))} yet: python train.py or python submit.py makes one"]
    told = {name: _told(name, [run for run in runs if scheduler(run) == name]) for name in job_states.COMMAND}
    silent = [command for name, command in job_states.COMMAND.items() if told[name] is None and which(command)]
    now = time.time()
    return [
        *(f"{clean(place)}: no run" for place, some in found.items() if not some),
        *table([row(run, told[scheduler(run)], now) for run in runs]),
        *(f"{command} does not answer: the states are what the run directories tell" for command in silent),
    ]


def one(run: RunRecord) -> Row:
    """Asks the scheduler of this run alone."""
    return row(run, _told(scheduler(run), [run]), time.time())


def row(run: RunRecord, told: dict[str, State] | None, now: float) -> Row:
    """One run, given what its scheduler knows (None: nobody to ask)."""
    job, state = _judged(run, told, now)
    short = f"{state.word} ({state.why})" if state.why and len(state.why) <= SHORT else state.word
    note = state.why if short == state.word else ""
    if state.word != "finished" and not note:
        note = history.first_error(run, logs_too=False) or (run.why if run.verdict == state.word == "failed" else "")
        note = note or history.first_error(run, logs_too=not (state.active or state.word in WELL))
    step, metric = history.latest_progress(run)
    hosts = len(run.attempts[-1].hosts) if run.attempts else 0
    runs_on = state.word in ACTIVE - {"running?"} and bool(run.attempts) and job == run.attempts[-1].job
    return Row(
        run=run.name,
        job=job or "-",
        state=short,
        attempts=len(run.attempts),
        nodes=hosts or run.submitted.get("nodes"),
        step=step,
        metric=metric,
        node_hours=history.node_hours(run, now if runs_on else None),
        note=note,
    )


def table(rows: Sequence[Row]) -> list[str]:
    """A line per run, at most 120 columns wide, notes on lines of their own; so are names that leave no room."""
    titles = ("job", "state", "attempts", "nodes", "step", "metric", "node-hours")
    cells = [titles, *([_cell(getattr(row, title.replace("-", "_"))) for title in titles] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    names = ["run", *(clean(row.run) for row in rows)]
    room = min(max(map(len, names)), max(WIDTH - sum(widths) - 2 * len(widths), len("run")))
    text = []
    for name, note, line in zip(names, ["", *(clean(row.note) for row in rows)], cells, strict=True):
        if len(name) > room:
            text.append(name)
            name = ""
        sized = [
            cell.ljust(width) if title in ("job", "state", "metric") else cell.rjust(width)
            for title, cell, width in zip(titles, line, widths, strict=True)
        ]
        text.append("  ".join([name.ljust(room), *sized]).rstrip())
        if note:
            text.append(f"    {note}")
    return text


def scheduler(run: RunRecord) -> str:
    """The one that it was submitted to; for a job made by hand, the one that is here, or whose launcher it had."""
    asked = run.submitted.get("scheduler")
    if asked in job_states.COMMAND:
        return asked
    if here := next((name for name, command in job_states.COMMAND.items() if which(command)), None):
        return here
    return "slurm" if run.attempts and run.attempts[-1].launcher in ("srun", "slurm") else "pbs"


def _told(scheduler: str, runs: Sequence[RunRecord]) -> dict[str, State] | None:
    """One question for all runs that are not known to be finished."""
    asked = [run for run in runs if run.jobs and not run.is_finished]
    jobs = {job for run in asked for job in run.jobs}
    return job_states.ask(scheduler, jobs, {run.owner for run in asked}) if asked else {}


def _judged(run: RunRecord, told: dict[str, State] | None, now: float) -> tuple[str | None, State]:
    """The job that counts and the run's state: what is certain first, what the directory lets one guess last."""
    if run.is_finished:
        return run.job, State("finished", run.why.partition(":")[0])  # pruned, where a search gave it up
    known = {job: told[job] for job in run.jobs if job in told} if told else {}
    for job, state in known.items():
        if state.active:
            return job, state
    error = run.submitted.get("error")
    if error and run.submit_time >= run.stale_before:
        return run.job, State("not submitted", str(error).removeprefix("not submitted").removeprefix(": "))
    if starts := history.num_stalled_starts(run):
        return run.job, State("given up", f"{starts} starts without a newer checkpoint")
    rejected = run.verdict == "continue" and known.get(run.job or "") == REJECTED  # its next start
    if run.verdict in OUTCOMES and not rejected and (told is None or _has_begun(run)):
        return run.job, State(OUTCOMES[run.verdict], run.why if run.verdict == "continue" else "")
    if run.job in known:
        return run.job, known[run.job]
    return run.job, State(_guessed(run, asked=told is not None and run.job is not None, now=now))


def _has_begun(run: RunRecord) -> bool:
    """Is the verdict that of the job that counts, or of one before it?"""
    return not run.attempts or run.attempts[-1].job == run.job


def _guessed(run: RunRecord, asked: bool, now: float) -> str:
    """The state without a verdict, and without a scheduler or (`asked`) with one that does not know the job."""
    last = run.attempts[-1] if run.attempts and run.attempts[-1].job == run.job else None
    if history.first_error(run, logs_too=False):
        return "failed"
    if last and last.end:
        return OUTCOMES.get(str(last.end.get("outcome")), "ended")
    if last:
        patience = last_alive.SILENT_SECONDS if last_alive.last_beat(run.path, last.number) else RECENT
        return "died" if asked or now - history.last_sign_of_life(run, last) > patience else "running?"
    if run.jobs:
        return "did not start" if asked else "submitted"
    return "not submitted"


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else clean(value)


def clean(value: object) -> str:
    """On one line, without what would steer a terminal."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return text if len(text) <= 400 else f"{text[:400]} ..."
