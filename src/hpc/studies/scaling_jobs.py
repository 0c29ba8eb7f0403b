"""The jobs of a scaling study: submit the runs that are missing, and wait for those that are queued or running."""

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hpc.config.errors import ConfigError
from hpc.jobs import job_states
from hpc.jobs.job_states import JobState
from hpc.run import command_line, frozen_config, history
from hpc.run.history import RunRecord
from hpc.studies.scaling_points import ScalingPoint
from hpc.submit import queue_run, resubmit
from hpc.submit.options import SubmitOptions

NOT_SUBMITTED = "not submitted"
MAX_PAUSE_SECONDS = 60  # between two queries of the scheduler
# Sections of the config that do not change what a run measures: of the cluster, only another name does.
UNCOMPARED = ("run_dir", "cluster", "force", "dirty_tree")


@dataclass(frozen=True)
class PointRun:
    """A point and the state of its run."""

    point: ScalingPoint
    state: JobState

    @property
    def is_finished(self) -> bool:
        return self.state.name == "finished"

    @property
    def has_failed(self) -> bool:
        return not (self.is_finished or self.state.is_active or self.state.name == NOT_SUBMITTED)

    @property
    def short_state(self) -> str:
        """The state in a few words, with the reason for waiting, but not the reason of a failure."""
        reason = f" ({self.state.reason})" if self.state.is_active and self.state.reason else ""
        return f"{self.state.name}{reason}"


def read_runs(points: Sequence[ScalingPoint]) -> list[PointRun]:
    """Return the state of each point. The scheduler gets one query for all jobs that have not finished."""
    unfinished = [run for point in points if (run := _read_run(point)) and run.jobs and not run.is_finished]
    job_ids, owners = {job_id for run in unfinished for job_id in run.jobs}, {run.owner for run in unfinished}
    scheduler = points[0].cfg.cluster.scheduler
    states = job_states.query_states(scheduler, job_ids, owners=owners) if unfinished else {}
    # Read again: otherwise a run that finished during the query would count as failed.
    return [PointRun(point, _run_state(_read_run(point), states)) for point in points]


def reject_other_study(points: Sequence[ScalingPoint]) -> None:
    """Raise `ConfigError` if the run directory of a point holds a run of another config."""
    for point in points:
        lines = frozen_config.list_changes(point.run_dir, point.cfg) if _read_run(point) else []
        changes = [line for line in lines if _is_compared(line.partition(":")[0])]
        if changes:
            rule = f"must be empty or hold this study, but {point.name} was submitted with another config"
            fix = "out=<a new folder>"
            raise ConfigError("out", point.run_dir.parent, f"{rule} ({'; '.join(changes[:3])})", fix)


def _is_compared(key: str) -> bool:
    return key == "cluster.name" or key.split(".")[0] not in UNCOMPARED


def submit_missing(runs: Sequence[PointRun], *, retry_failed: bool) -> None:
    """Submit the points that have no job. Ctrl-C counts after the submission that it interrupts.

    Args:
        retry_failed: submit failed points again, which go on from their last checkpoint.

    Raises:
        ConfigError: a job cannot be submitted. Those before it are queued.
    """
    for run in runs:
        if run.state.name == NOT_SUBMITTED or (retry_failed and run.has_failed):
            print(f"{run.point.name}:", flush=True)
            with _delay_interrupt():
                _submit(run.point)


def wait_for_jobs(points: Sequence[ScalingPoint]) -> list[PointRun]:
    """Return the state of each point once no job is queued or running. Print the states when they change."""
    start_time, printed = time.monotonic(), ""
    while True:
        runs = read_runs(points)
        states = ", ".join(f"{run.point.name} {run.short_state}" for run in runs)
        if states != printed:
            printed = states
            print(f"{time.strftime('%H:%M:%S')} {states}", flush=True)
        if not any(run.state.is_active for run in runs):
            return runs
        time.sleep(min(max((time.monotonic() - start_time) / 10, 1), MAX_PAUSE_SECONDS))


def _submit(point: ScalingPoint) -> None:
    options = SubmitOptions()
    if _read_run(point):  # its job failed
        cfg = command_line.compose_resumed(point.run_dir, point.overrides)
        resubmit.resubmit(cfg, point.run_dir, words=point.overrides, options=options)
        return
    try:
        queue_run.submit_run(point.cfg, point.overrides, options=options)
    except ConfigError as error:
        if error.key != "run_dir":  # the study has set it, from out=
            raise
        raise ConfigError("out", error.value, error.rule, "out=<a new folder>, or remove what is there") from None


@contextmanager
def _delay_interrupt() -> Iterator[None]:
    """Deliver Ctrl-C after the block. sbatch inherits the blocked signal, so it cannot end before it prints its job."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _read_run(point: ScalingPoint) -> RunRecord | None:
    """Return the run of a point; None if it has not been written for a job."""
    is_written = (point.run_dir / "job.sh").exists()
    return history.read_run(point.run_dir, point.name) if is_written else None


def _run_state(run: RunRecord | None, states: Mapping[str, JobState] | None) -> JobState:
    """Return the state of a run.

    Args:
        states: of the jobs that the scheduler knows, by job id; None if it does not answer.
    """
    if run is None or run.is_finished:
        return JobState("finished" if run else NOT_SUBMITTED)
    run_states = [states[job_id] for job_id in run.jobs if job_id in states] if states else []
    if active := next((state for state in run_states if state.is_active), None):
        return active
    if not run.jobs:
        return JobState(NOT_SUBMITTED)
    if states is None:
        return JobState("unknown", "the scheduler does not answer", is_active=True)
    ended = next((state for state in run_states if state.name != "completed"), JobState("failed"))
    reason = history.first_error(run, logs_too=True) or run.why or ended.reason or "unknown reason, see its log"
    return JobState(ended.name, reason)
