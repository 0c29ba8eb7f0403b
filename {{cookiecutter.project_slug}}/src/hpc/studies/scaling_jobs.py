"""The jobs of a scaling study: a run directory per job of a point, and the state of its newest job. Changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path

from hpc.jobs import job_states
from hpc.jobs.job_states import JobState
from hpc.run import history
from hpc.run.history import RunRecord
from hpc.studies.scaling_points import ScalingPoint

NOT_SUBMITTED = "not submitted"


@dataclass(frozen=True)
class PointJob:
    """The newest job of a point."""

    point: ScalingPoint
    run: RunRecord | None  # None: it has no run directory yet
    state: JobState

    @property
    def name(self) -> str:
        return f"nodes={self.point.num_nodes}"

    @property
    def short_state(self) -> str:
        """The state in a few words, with the reason for waiting, but not the reason of a failure."""
        reason = f" ({self.state.reason})" if self.state.is_active and self.state.reason else ""
        return f"{self.name} {self.state.name}{reason}"

    @property
    def is_finished(self) -> bool:
        return self.run is not None and self.run.is_finished

    @property
    def has_failed(self) -> bool:
        return not (self.is_finished or self.state.is_active or self.state.name == NOT_SUBMITTED)


def newest_run_dir(folder: Path, num_nodes: int) -> Path:
    """Return the run directory of a point's newest job, e.g. nodes-4 or nodes-4.3; of the first if there is none."""
    existing = _existing_run_dirs(folder, num_nodes)
    return existing[-1] if existing else next_run_dir(folder, num_nodes)


def next_run_dir(folder: Path, num_nodes: int) -> Path:
    """Return the run directory of a point's next job, which does not exist yet."""
    return _numbered_run_dir(folder, num_nodes, number=len(_existing_run_dirs(folder, num_nodes)) + 1)


def _existing_run_dirs(folder: Path, num_nodes: int) -> list[Path]:
    paths = (_numbered_run_dir(folder, num_nodes, number=number) for number in count(1))
    return list(takewhile(Path.exists, paths))


def _numbered_run_dir(folder: Path, num_nodes: int, *, number: int) -> Path:
    return folder / (f"nodes-{num_nodes}" + (f".{number}" if number > 1 else ""))


def read_point_jobs(folder: Path, points: Sequence[ScalingPoint], *, scheduler: str) -> list[PointJob]:
    """Return the newest job of each point. The scheduler gets one query for all jobs that have not finished."""
    runs = [run for point in points if (run := _read_job(folder, point).run) and run.jobs and not run.is_finished]
    job_ids, owners = {job_id for run in runs for job_id in run.jobs}, {run.owner for run in runs}
    states = job_states.query_states(scheduler, job_ids, owners=owners) if runs else {}
    # Read again: otherwise a run that finished during the query would count as failed.
    return [_with_state(_read_job(folder, point), states) for point in points]


def jobs_to_submit(
    folder: Path, points: Sequence[ScalingPoint], *, scheduler: str, retry_failed: bool
) -> list[PointJob]:
    """Return those points that have no job; with `retry_failed` also those whose job has failed."""
    jobs = read_point_jobs(folder, points, scheduler=scheduler)
    return [job for job in jobs if job.state.name == NOT_SUBMITTED or (retry_failed and job.has_failed)]


def _with_state(job: PointJob, states: Mapping[str, JobState] | None) -> PointJob:
    """Return the job with its state.

    Args:
        states: of the jobs that the scheduler knows, by job id; None if it does not answer.
    """
    run = job.run
    if run is None or run.is_finished:
        return replace(job, state=JobState("finished" if run else NOT_SUBMITTED))
    run_states = [states[job_id] for job_id in run.jobs if job_id in states] if states else []
    if active := next((state for state in run_states if state.is_active), None):
        return replace(job, state=active)
    if not run.jobs or run.submitted.get("error"):
        return replace(job, state=JobState(NOT_SUBMITTED, str(run.submitted.get("error") or "")))
    if states is None:
        return replace(job, state=JobState("unknown", is_active=True))
    ended = next((state for state in run_states if state.name != "completed"), JobState("failed"))
    reason = history.first_error(run, logs_too=True) or run.why or ended.reason or "unknown reason, see its log"
    return replace(job, state=JobState(ended.name, reason))


def _read_job(folder: Path, point: ScalingPoint) -> PointJob:
    path = newest_run_dir(folder, point.num_nodes)
    return PointJob(point, history.read_run(path, path.name) if path.is_dir() else None, JobState(NOT_SUBMITTED))
