"""A table of runs, from their directories and, if there is one, from the scheduler. Imports no torch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from hpc.jobs import job_states
from hpc.jobs.job_states import JobState
from hpc.report.latest_metric import latest_step_and_metric
from hpc.run import history
from hpc.run.history import RunRecord
from hpc.system.tables import make_console, one_line, table_lines

TITLES = ("run", "job", "state", "attempts", "nodes", "step", "metric", "node-hours")
MAX_REASON_LENGTH = 40  # characters of a reason that is shown behind the state; a longer one stands below the table
OUTCOMES = {"finished": "finished", "continue": "to be continued", "failed": "failed"}
ACTIVE = {"running", "completing", "running?"}  # states of a run that makes steps
SILENT_SECONDS = 60  # without a heartbeat, of which there is one every 2 s: a file server shows some of them late
REJECTED = JobState("failed", "exit code 2")
STATES_WITHOUT_ERROR = {"finished", "to be continued", "completed", "submitted", "not submitted", "running?"}


@dataclass(frozen=True)
class RunRow:
    """A row of the table: the cells of a run."""

    run: str
    job: str
    state: str
    attempts: int
    nodes: int | None
    step: int | None
    metric: str
    node_hours: float
    note: str  # why the run waits, or its first error


def format_runs(places: Sequence[Path]) -> list[str]:
    """Return the table of all runs at or below these places, newest last, and the first error of each below it."""
    runs_by_place = {place: history.find_runs(place) for place in places}
    runs = [run for runs_of_place in runs_by_place.values() for run in runs_of_place]
    runs.sort(key=lambda run: (run.submit_time or _start_time(run), run.path.parent, run.index))
    if not runs:
        return [f"There is no run in {' '.join(map(str, places))} yet. Try: python train.py, or python submit.py"]
    rows, silent = query_rows(runs)
    cells = [[_cell(getattr(row, title.replace("-", "_"))) for title in TITLES] for row in rows]
    return [
        *(f"{one_line(place)}: there is no run" for place, runs_of_place in runs_by_place.items() if not runs_of_place),
        *table_lines(TITLES, cells, console=make_console()),
        *(one_line(f"{row.run}: {row.note}") for row in rows if row.note),
        *(f"{command} does not answer, so the states come from the run directories alone" for command in silent),
    ]


def _start_time(run: RunRecord) -> float:
    """Return the unix time of the last start; 0 if there is none."""
    return run.attempts[-1].start if run.attempts else 0


def query_rows(runs: Sequence[RunRecord]) -> tuple[list[RunRow], list[str]]:
    """Return the rows of runs, after asking each scheduler once for all jobs; and the commands that did not answer."""
    states = {
        name: _query_states(name, [run for run in runs if scheduler_of_run(run) == name])
        for name in job_states.QUERY_COMMAND
    }
    silent = [command for name, command in job_states.QUERY_COMMAND.items() if states[name] is None and which(command)]
    now = time.time()
    return [_make_row(run, states[scheduler_of_run(run)], now) for run in runs], silent


def _make_row(run: RunRecord, states: dict[str, JobState] | None, now: float) -> RunRow:
    """Return the row of a run.

    Args:
        states: of jobs, from the scheduler; None if it cannot be asked.
        now: unix time.
    """
    job, state = _job_and_state(run, states, now)
    has_short_reason = bool(state.reason) and len(state.reason) <= MAX_REASON_LENGTH
    note = "" if has_short_reason else state.reason
    if state.name != "finished" and not note:
        note = history.first_error(run, logs_too=False) or (run.why if run.verdict == state.name == "failed" else "")
        note = note or history.first_error(run, logs_too=not (state.is_active or state.name in STATES_WITHOUT_ERROR))
    note = note or _describe_awaited(run, state)
    step, metric = latest_step_and_metric(run)
    num_hosts = len(run.attempts[-1].hosts) if run.attempts else 0
    is_running = state.name in ACTIVE - {"running?"} and bool(run.attempts) and job == run.attempts[-1].job
    return RunRow(
        run=run.name,
        job=job or "-",
        state=f"{state.name} ({state.reason})" if has_short_reason else state.name,
        attempts=len(run.attempts),
        nodes=num_hosts or run.submitted.get("nodes"),
        step=step,
        metric=metric,
        node_hours=history.node_hours(run, now if is_running else None),
        note=note,
    )


def _describe_awaited(run: RunRecord, state: JobState) -> str:
    """Return which run the job waits for, or waited for until it was removed; "" if none, or if it has started."""
    after = run.submitted.get("after")
    if not after or (run.attempts and run.attempts[-1].job == run.job):
        return ""
    if state.is_active:
        return f"it waits for {after}"
    awaited = history.find_run(Path(after))
    return f"it waited for {after}{', which failed' if awaited and awaited.verdict == 'failed' else ''}"


def scheduler_of_run(run: RunRecord) -> str:
    """Return the scheduler that a run was submitted to.

    If that is not recorded, as a person submitted the job script, it is the one of the run's config, or of this
    machine.
    """
    for scheduler in (run.submitted.get("scheduler"), history.config_word(run, "cluster", "scheduler")):
        if scheduler in job_states.QUERY_COMMAND:
            return scheduler
    return next((name for name, command in job_states.QUERY_COMMAND.items() if which(command)), "slurm")


def _query_states(scheduler: str, runs: Sequence[RunRecord]) -> dict[str, JobState] | None:
    """Return the states of the jobs of all unfinished runs, from a single call; None if there is no answer."""
    unfinished = [run for run in runs if run.jobs and not run.is_finished]
    jobs = {job for run in unfinished for job in run.jobs}
    return job_states.query_states(scheduler, jobs, owners={run.owner for run in unfinished}) if unfinished else {}


def _job_and_state(run: RunRecord, states: dict[str, JobState] | None, now: float) -> tuple[str | None, JobState]:
    """Return the job that counts and the state of the run, from certain facts first and from guesses last."""
    if run.is_finished:
        return run.job, JobState("finished", run.why.partition(":")[0])  # "pruned", if a search ended it early
    known = {job: states[job] for job in run.jobs if job in states} if states else {}
    active = next(((job, state) for job, state in known.items() if state.is_active), None)
    # A run that shares its node may have ended in a job that goes on.
    end = history.end_before_neighbours(run, active[0] if active else run.job)
    if active and (not end or (end == "continue" and active[1].name == "pending")):
        return active
    if starts := history.num_starts_at_giving_up(run):
        return run.job, JobState("given up", f"{starts} starts without a newer checkpoint")
    # The verdict of an attempt stays if the next start of the run is rejected.
    is_restart_rejected = run.verdict == "continue" and (end == "failed" or known.get(run.job or "") == REJECTED)
    if run.verdict in OUTCOMES and not is_restart_rejected and (states is None or _has_started(run)):
        return run.job, JobState(OUTCOMES[run.verdict], run.why if run.verdict == "continue" else "")
    if end:
        return run.job, JobState(OUTCOMES[end])
    if run.job in known:
        return run.job, known[run.job]
    return run.job, _guess_state(run, is_job_unknown=states is not None, now=now)


def _has_started(run: RunRecord) -> bool:
    """Return whether the verdict is that of the job that counts, and not of an earlier one."""
    return not run.attempts or run.attempts[-1].job == run.job


def _guess_state(run: RunRecord, *, is_job_unknown: bool, now: float) -> JobState:
    """Return the probable state of a run without a verdict.

    Args:
        is_job_unknown: the scheduler answered, but does not know the job. It may be the scheduler of another cluster
            with the same file system, so an attempt that has started is judged by its signs of life alone.
    """
    last = run.attempts[-1] if run.attempts and run.attempts[-1].job == run.job else None
    if history.first_error(run, logs_too=False):
        return JobState("failed")
    if last and last.end:
        return JobState(OUTCOMES.get(str(last.end.get("outcome")), "ended"))
    if last:
        is_silent = now - history.last_sign_of_life(run, last) > SILENT_SECONDS
        return JobState("died" if is_silent else "running?")
    if run.jobs and is_job_unknown:
        return JobState("unknown", f"{job_states.QUERY_COMMAND[scheduler_of_run(run)]} does not know its job")
    return JobState("submitted" if run.jobs else "not submitted")


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
