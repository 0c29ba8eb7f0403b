"""The jobs of a scaling study: a run directory per try at a point, and what has become of it. Changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path

from hpc.jobs import job_states
from hpc.jobs.job_states import JobState
from hpc.run import history
from hpc.run.history import RunRecord
from hpc.studies.scaling_points import Point

REJECTED = "not submitted"


@dataclass(frozen=True)
class Try:
    """The newest one at a point."""

    point: Point
    run: RunRecord | None  # None: there is none yet
    state: JobState

    @property
    def name(self) -> str:
        return f"nodes={self.point.nodes}"

    @property
    def told(self) -> str:
        """In few words; why it waits, not how it failed."""
        waits = f" ({self.state.reason})" if self.state.is_active and self.state.reason else ""
        return f"{self.name} {self.state.name}{waits}"

    @property
    def finished(self) -> bool:
        return self.run is not None and self.run.is_finished

    @property
    def failed(self) -> bool:
        return not (self.finished or self.state.is_active or self.state.name == REJECTED)


def directory(folder: Path, nodes: int, again: bool) -> Path:
    """Of the newest try, nodes-4 or nodes-4.3; with `again` of the next one, where there is one already."""
    names = (folder / (f"nodes-{nodes}" + (f".{number}" if number > 1 else "")) for number in count(1))
    there = list(takewhile(Path.exists, names))
    following = folder / (f"nodes-{nodes}" + (f".{len(there) + 1}" if there else ""))
    return following if again or not there else there[-1]


def look(folder: Path, points: Sequence[Point], scheduler: str) -> list[Try]:
    """The newest try at each point; one question to the scheduler for all that are not finished."""
    before = [_read(folder, point) for point in points]
    asked = [run for one in before if (run := one.run) and run.jobs and not run.is_finished]
    jobs, owners = {job for run in asked for job in run.jobs}, {run.owner for run in asked}
    told = job_states.query_states(scheduler, jobs, owners) if asked else {}
    # Read once more: a run that ended well while the scheduler was asked would else be taken for one that failed.
    return [judged(_read(folder, point), told) for point in points]


def missing(folder: Path, points: Sequence[Point], scheduler: str, again: bool) -> list[Try]:
    """The points that have no job; with `again` also those whose job has failed."""
    found = look(folder, points, scheduler)
    return [one for one in found if one.state.name == REJECTED or (again and one.failed)]


def judged(one: Try, told: dict[str, JobState] | None) -> Try:
    """With its state, given what the scheduler knows of the jobs; None: it does not answer."""
    run = one.run
    if run is None or run.is_finished:
        return replace(one, state=JobState("finished" if run else REJECTED))
    known = [told[job] for job in run.jobs if job in told] if told else []
    if active := next((state for state in known if state.is_active), None):
        return replace(one, state=active)
    if not run.jobs or run.submitted.get("error"):
        return replace(one, state=JobState(REJECTED, str(run.submitted.get("error") or "")))
    if told is None:
        return replace(one, state=JobState("unknown", is_active=True))
    ended = next((state for state in known if state.name != "completed"), JobState("failed"))
    why = history.first_error(run, logs_too=True) or run.why or ended.reason or "it left no reason, see its log"
    return replace(one, state=JobState(ended.name, why))


def _read(folder: Path, point: Point) -> Try:
    path = directory(folder, point.nodes, again=False)
    return Try(point, history.read_run(path, path.name) if path.is_dir() else None, JobState(REJECTED))
