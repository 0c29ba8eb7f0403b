"""What runs have left in their directories, read again: attempts, errors, scalars. Asks nobody; imports no torch."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpc.run import causes, claim, directory, job_logs, last_alive, last_step
from hpc.run.job_logs import text
from hpc.system.files import parse_json

SKEW = 5  # seconds that the clocks of nodes may differ
LATEST = 2**36  # unix time of a file that is sound: the year 4147


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Times are unix times."""

    number: int
    start: float
    job: str | None
    hosts: list[str]
    world_size: int
    end: dict[str, Any] | None  # what attempts.jsonl says of it
    launcher: str = ""


@dataclass(frozen=True)
class Run:
    """What lies in a run directory."""

    path: Path
    name: str
    owner: int  # user id
    attempts: list[Attempt]
    verdict: str | None
    why: str  # of the verdict
    submitted: dict[str, Any]  # its own submitted.json, or its sweep's
    jobs: list[str]  # all that may have to do with it
    job: str | None  # the one of the last attempt, or that is to make the next
    index: int  # in its sweep

    @property
    def asked(self) -> float:
        """When it was last submitted; 0: never."""
        return self.submitted.get("time", 0)

    @property
    def since(self) -> float:
        """What was written before this time concerns an earlier attempt."""
        return max(self.asked, self.attempts[-1].start if self.attempts else 0)

    @property
    def finished(self) -> bool:
        """And not submitted once more after that."""
        ended = self.attempts[-1].end if self.attempts else None
        again = ended and self.asked > ended["time"] and not self.submitted.get("error")
        return self.verdict == "finished" and not again


def find(place: Path, name: str = "", depth: int = 2) -> list[Run]:
    """The run at this place, or those in it and in the sweeps in it; what cannot be read is passed over."""
    try:
        if _is_run(place):
            return [read(place, name or place.resolve().name)]
        inside = sorted(path for path in place.iterdir() if path.is_dir() and depth)
    except OSError:
        return []
    above = name or (place.resolve().name if (place / "members").exists() else "")
    return [run for path in inside for run in find(path, f"{above}/{path.name}".lstrip("/"), depth - 1)]


def read(path: Path, name: str) -> Run:
    """A run directory. Damaged files count as missing."""
    member = _member(path)
    own, sweep = _json(path / "submitted.json"), _json(path.parent / "submitted.json") if member is not None else {}
    submitted, index = (own, None) if own else (sweep, member)
    jobs = [_number(job, submitted.get("scheduler"), index) for job in submitted.get("jobs") or []]
    attempts, job = _attempts(path), next(iter(jobs), None)
    if attempts and (attempts[-1].job in jobs or attempts[-1].start >= submitted.get("time", 0)):
        job = attempts[-1].job
        jobs += [job] if job and job not in jobs else []
    waiting = _successors(path, attempts)
    jobs += [number for number in waiting if number not in jobs]
    if waiting and max(waiting.values()) >= max(submitted.get("time", 0), attempts[-1].start if attempts else 0):
        job = max(reversed(waiting), key=lambda number: waiting[number])  # of one second, the last
    said = text(path / "verdict")
    verdict, why = (found[1] if (found := re.search(rf"(?m)^{key} (.+)$", said)) else "" for key in ("outcome", "why"))
    return Run(path, name, path.stat().st_uid, attempts, verdict or None, why, submitted, jobs, job, member or 0)


def first_error(run: Run, logs_too: bool) -> str:
    """What a rank left in the last attempt as the first cause, else what the job's logs tell first; or nothing."""
    return _raised(run) or (job_logs.first_error(run.path, run.job) if logs_too else "")


def stalled(run: Run) -> int:
    """Starts in a row without a newer checkpoint, where they were so many that the job gave up; else 0."""
    count = text(run.path / "stalled").strip()
    limit = re.search(r"(?m)^faults:\n(?: .*\n)*? +retries: (\d+)", text(run.path / "config.yaml"))
    since = (_changed(run.path / "stalled") or 0) >= run.asked - SKEW  # not submitted once more after that
    return int(count) if count.isdecimal() and limit and int(count) >= int(limit[1]) and since else 0


def progress(run: Run) -> tuple[int | None, str]:
    """The last step, and one metric: of the last test, else of the last validation."""
    ends = [attempt.end for attempt in run.attempts if attempt.end]
    last = ends[-1] if ends else {}
    metrics = last.get("metrics", {})
    tested = {k: v for k, v in metrics.items() if k.startswith("test/") and isinstance(v, int | float)}
    step = last.get("step")
    if not run.attempts or (tested and run.attempts[-1].end):
        return step, _one(tested)
    newest, validated = last_step.scalars(*directory.log_dirs(run.path))
    made = max((made for made in (newest, last_step.saved(run.path)) if made is not None), default=step)
    return step if run.attempts[-1].end else made, _one(tested or validated)


def node_hours(run: Run, runs_till: float | None) -> float:
    """Time x nodes, summed over attempts. One that left no end lasted until its last sign of life before the next.

    Args:
        runs_till: now, where the scheduler says that the last attempt still runs.
    """
    used = 0.0
    for attempt, following in zip_longest(run.attempts, run.attempts[1:]):
        until = attempt.end["time"] if attempt.end else None if following else runs_till
        until = until or last_sign(run, attempt, following.start if following else math.inf)
        used += max(until - attempt.start, 0) * max(len(attempt.hosts), 1)
    return used / 3600


def last_sign(run: Run, attempt: Attempt, until: float = math.inf) -> float:
    """When an attempt was seen alive last, before the next one began. A requeued job waits in between."""
    return last_alive.last(run.path, attempt.number, attempt.start, str(next(iter(attempt.hosts), "")), until)


def raised(run: Run, number: int, since: float = 0) -> str:
    """The first cause among what the ranks of an attempt have left since then; or nothing."""
    found = next((attempt for attempt in run.attempts if attempt.number == number), None)
    left = [cause for cause in causes.read(run.path, number) if cause.time >= since]
    cause = causes.first(left, found.world_size if found else 0, found.hosts if found else ())
    return cause.line if cause else ""


def _raised(run: Run) -> str:
    """Of the newest attempt, since the run was submitted."""
    folders = {int(path.name) for path in run.path.glob("errors/*") if path.name.isdecimal()}
    try:
        newest = max({claim.newest(run.path), *folders, *(attempt.number for attempt in run.attempts)})
    except OSError:
        return ""
    return raised(run, newest, run.asked - SKEW)


def _one(metrics: Mapping[str, float]) -> str:
    """The metric that says most: not the loss where there is another."""
    names = [name for name in metrics if not name.endswith("loss")] or list(metrics)
    return f"{names[-1]} {metrics[names[-1]]:.4g}" if names else "-"


def _is_run(folder: Path) -> bool:
    # A run of a search has no config before it starts.
    made = (folder / "job.sh").exists() and ((folder / "config.yaml").exists() or _member(folder) is not None)
    return made or (folder / "attempts.jsonl").exists() or any(folder.glob("errors/*/rank-*.txt"))


def _member(path: Path) -> int | None:
    """Index of a run in its sweep."""
    names = [Path(line).name for line in text(path.parent / "members").splitlines()]
    return names.index(path.name) if path.name in names else None


def _number(job: str, scheduler: str | None, index: int | None) -> str:
    """The job as the scheduler prints it, without the server: `29[].server` and member 3 give `29[3]`."""
    number = str(job).split(".")[0]
    if index is None:
        return number
    return f"{number}_{index}" if scheduler == "slurm" else number.replace("[]", f"[{index}]")


def _successors(path: Path, attempts: list[Attempt]) -> dict[str, float]:
    """The jobs that job.sh has queued to go on (PBS) and that have not begun an attempt, with the time of each."""
    found = re.findall(r"(?m)^(\d{1,12}) (\S+)$", text(path / "successors"))
    begun = {attempt.job for attempt in attempts}
    return {number: int(time) for time, job in found if (number := _number(job, "pbs", None)) not in begun}


def damaged(path: Path) -> int:
    """Lines of attempts.jsonl that tell nothing."""
    lines = [line for line in text(path / "attempts.jsonl").splitlines() if line.strip()]
    return len(lines) - len(_events_of(path))


def _events_of(path: Path) -> list[dict[str, Any]]:
    kinds = {"hosts": list, "metrics": dict, "attempt": int, "world_size": int}
    return [event for event in directory.events(path) if _sound(event, **kinds)]


def _attempts(path: Path) -> list[Attempt]:
    events = _events_of(path)
    ends = {event.get("attempt"): event for event in events if event.get("event") == "end"}
    return [
        Attempt(
            event.get("attempt", 0),
            event["time"],
            event.get("job"),
            event.get("hosts", []),
            event.get("world_size", 0),
            ends.get(event.get("attempt")),
            str(event.get("launcher") or ""),
        )
        for event in events
        if event.get("event") == "start"
    ]


def _json(path: Path) -> dict[str, Any]:
    try:
        note = parse_json(text(path))
    except ValueError:
        return {}
    return note if _sound(note, jobs=list) else {}


def _sound(note: Any, **kinds: type) -> bool:
    """Is it one of ours? It has a time, and lists and dicts where they belong."""
    if not isinstance(note, dict) or not isinstance(when := note.get("time"), int | float) or not 0 <= when < LATEST:
        return False
    return all(isinstance(note.get(key, kind()), kind) for key, kind in kinds.items())


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
