"""The records of runs in their directories: attempts, errors, heartbeats. Asks no scheduler; imports no torch."""

import math
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hpc.run import attempt_log, causes, claim, job_logs
from hpc.run.job_logs import read_tail
from hpc.system.files import parse_json

CLOCK_SKEW_SECONDS = 5  # that the clocks of nodes may differ
LATEST_TIME = 2**36  # a later unix time (the year 4147) is damaged


@dataclass(frozen=True)
class AttemptRecord:
    """One start of a run. Times are unix times."""

    number: int
    start: float
    job: str | None
    hosts: list[str]
    world_size: int
    end: dict[str, Any] | None  # its end event in attempts.jsonl
    from_step: int = 0  # step of the checkpoint that it resumed from


@dataclass(frozen=True)
class RunRecord:
    """The content of a run directory."""

    path: Path
    name: str
    owner: int  # user id
    attempts: list[AttemptRecord]
    verdict: str | None
    why: str  # of the verdict
    submitted: dict[str, Any]  # its own submitted.json, or its sweep's
    jobs: list[str]  # all that may belong to it
    job: str | None  # the one of the last attempt, or the one that will make the next
    index: int  # in its sweep

    @property
    def submit_time(self) -> float:
        """Unix time when it was last submitted; 0: never."""
        return self.submitted.get("time", 0)

    @property
    def runs_per_node(self) -> int:
        """Number of runs of its sweep that share a node."""
        return max(self.submitted.get("runs_per_node", 1), 1)

    @property
    def is_finished(self) -> bool:
        """Return True if the run has finished and was not submitted once more after that."""
        end = self.attempts[-1].end if self.attempts else None
        is_resubmitted = end and self.submit_time > end["time"]
        return self.verdict == "finished" and not is_resubmitted


def find_runs(folder: Path, *, name: str = "", depth: int = 2) -> list[RunRecord]:
    """Return the run in this folder, or the runs and the sweeps' runs below it; unreadable folders are left out."""
    try:
        if _is_run(folder):
            return [read_run(folder, name or folder.resolve().name)]
        subfolders = sorted(path for path in folder.iterdir() if path.is_dir() and depth)
    except OSError:
        return []
    prefix = name or (folder.resolve().name if (folder / "members").exists() else "")
    names = {path: f"{prefix}/{path.name}".lstrip("/") for path in subfolders}
    return [run for path in subfolders for run in find_runs(path, name=names[path], depth=depth - 1)]


def find_run(folder: Path) -> RunRecord | None:
    """Return the run in this folder; None if there is none that can be read."""
    try:
        return read_run(folder, folder.name) if _is_run(folder) else None
    except (OSError, ValueError):  # a damaged file may have named the folder
        return None


def read_run(path: Path, name: str) -> RunRecord:
    """Return the record of a run directory. Damaged files count as missing."""
    index = _array_index(path)
    submitted, job_index = _read_submitted(path / "submitted.json"), None
    if not submitted and index is not None:
        submitted = _read_submitted(path.parent / "submitted.json")
        job_index = index // max(submitted.get("runs_per_node", 1), 1)
    jobs = [_format_job_id(job, submitted.get("scheduler"), index=job_index) for job in submitted.get("jobs") or []]
    attempts, job = _read_attempts(path), next(iter(jobs), None)
    if attempts and (attempts[-1].job in jobs or attempts[-1].start >= submitted.get("time", 0)):
        job = attempts[-1].job
        jobs += [job] if job and job not in jobs else []
    successors = _waiting_successors(path, attempts)
    jobs += [number for number in successors if number not in jobs]
    newest = max(submitted.get("time", 0), attempts[-1].start if attempts else 0)
    if successors and max(successors.values()) >= newest:
        job = max(reversed(successors), key=lambda number: successors[number])  # of one second, the last
    verdict, why = (_verdict_field(path, key) for key in ("outcome", "why"))
    return RunRecord(path, name, path.stat().st_uid, attempts, verdict or None, why, submitted, jobs, job, index or 0)


def first_error(run: RunRecord, *, logs_too: bool) -> str:
    """Return the first cause of the newest attempt since the run was submitted, else the first error in its job's logs.

    Returns:
        "" if there is none.
    """
    cause, folders = "", {int(path.name) for path in run.path.glob("errors/*") if path.name.isdecimal()}
    with suppress(OSError):
        newest = max({claim.newest_attempt(run.path), *folders, *(attempt.number for attempt in run.attempts)})
        cause = first_cause_of_attempt(run, newest, since=run.submit_time - CLOCK_SKEW_SECONDS)
    return cause or (job_logs.first_logged_error(run.path, run.job) if logs_too else "")


def end_before_neighbours(run: RunRecord, job: str | None) -> str:
    """Return how a run that shares its node with others ended in a job that may go on with these.

    Returns:
        "failed"; "continue", if it goes on when the job is requeued; "" if neither is recorded.
    """
    ended_job, _, outcome = read_tail(run.path / "ended").strip().partition(" ")
    return outcome if job and ended_job == job and outcome in ("failed", "continue") else ""


def num_starts_at_giving_up(run: RunRecord) -> int:
    """Return the number of starts in a row without a newer checkpoint, if the job gave up because of them; else 0."""
    count = read_tail(run.path / "stalled").strip()
    limit = config_word(run, "faults", "retries")
    is_current = _modified_time(run.path / "stalled") >= run.submit_time - CLOCK_SKEW_SECONDS
    return int(count) if count.isdecimal() and limit.isdecimal() and int(count) >= int(limit) and is_current else 0


def config_word(run: RunRecord, section: str, key: str) -> str:
    """Return the text of a value in a section of the run's config; "" if it is not there. YAML is not imported."""
    found = re.search(rf"(?m)^{section}:\n(?: .*\n)*? +{key}: (\S+)", read_tail(run.path / "config.yaml"))
    return found[1] if found else ""


def node_hours(run: RunRecord, running_until: float | None) -> float:
    """Return time x nodes, summed over attempts, and divided by the number of runs that share a node.

    An attempt without an end lasted until its last sign of life.

    Args:
        running_until: now, where the scheduler says that the last attempt still runs.
    """
    node_seconds = 0.0
    for attempt, following in zip_longest(run.attempts, run.attempts[1:]):
        end = attempt.end["time"] if attempt.end else None if following else running_until
        end = end or last_sign_of_life(run, attempt, until=following.start if following else math.inf)
        node_seconds += max(end - attempt.start, 0) * max(len(attempt.hosts), 1)
    return node_seconds / 3600 / run.runs_per_node


def last_sign_of_life(run: RunRecord, attempt: AttemptRecord, *, until: float = math.inf) -> float:
    """Return the unix time of an attempt's last heartbeat; its start, if it left none before the next one started.

    Args:
        until: unix time of that next start.
    """
    beat = _modified_time(run.path / "claims" / f"{attempt.number:06}.beat")
    return beat if attempt.start <= beat <= until else attempt.start


def first_cause_of_attempt(run: RunRecord, number: int, *, since: float = 0) -> str:
    """Return the first cause among the errors that the ranks of an attempt have left since then; or ""."""
    attempt = next((attempt for attempt in run.attempts if attempt.number == number), None)
    errors = [cause for cause in causes.read_causes(run.path, number) if cause.time >= since]
    ranks = {"world_size": attempt.world_size, "hosts": attempt.hosts} if attempt else {}
    cause = causes.first_cause(errors, **ranks)
    return cause.line if cause else ""


def num_damaged_lines(path: Path) -> int:
    """Return the number of lines in attempts.jsonl that hold no event."""
    lines = [line for line in read_tail(path / "attempts.jsonl").splitlines() if line.strip()]
    return len(lines) - len(_valid_events(path))


def _modified_time(path: Path) -> float:
    """Return the unix time at which a file was last modified; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _is_run(folder: Path) -> bool:
    # A run of a search has no config before it starts.
    has_config = (folder / "config.yaml").exists() or _array_index(folder) is not None
    is_submitted = (folder / "job.sh").exists() and has_config
    return is_submitted or (folder / "attempts.jsonl").exists() or any(folder.glob("errors/*/rank-*.txt"))


def _array_index(path: Path) -> int | None:
    """Return the index of a run in its sweep; None if it is of none."""
    names = [Path(line).name for line in read_tail(path.parent / "members").splitlines()]
    return names.index(path.name) if path.name in names else None


def _verdict_field(path: Path, key: str) -> str:
    match = re.search(rf"(?m)^{key} (.+)$", read_tail(path / "verdict"))
    return match[1] if match else ""


def _format_job_id(job: str, scheduler: str | None, *, index: int | None) -> str:
    """Return the job as the scheduler prints it, without the server: `29[].server` and index 3 give `29[3]`."""
    number = str(job).split(".")[0]
    if index is None:
        return number
    return f"{number}_{index}" if scheduler == "slurm" else number.replace("[]", f"[{index}]")


def _waiting_successors(path: Path, attempts: list[AttemptRecord]) -> dict[str, float]:
    """Return the jobs that job.sh has queued to continue (PBS) and that have not started yet, with their times."""
    lines = re.findall(r"(?m)^(\d{1,12}) (\S+)$", read_tail(path / "successors"))
    started = {attempt.job for attempt in attempts}
    return {
        number: int(time) for time, job in lines if (number := _format_job_id(job, "pbs", index=None)) not in started
    }


def _valid_events(path: Path) -> list[dict[str, Any]]:
    return [event for event in attempt_log.read_events(path) if _is_valid(event)]


def _read_attempts(path: Path) -> list[AttemptRecord]:
    events = _valid_events(path)
    ends = {event.get("attempt"): event for event in events if event.get("event") == "end"}
    return [
        AttemptRecord(
            event.get("attempt", 0),
            event["time"],
            event.get("job"),
            event.get("hosts", []),
            event.get("world_size", 0),
            ends.get(event.get("attempt")),
            event.get("from_step", 0),
        )
        for event in events
        if event.get("event") == "start"
    ]


def _read_submitted(path: Path) -> dict[str, Any]:
    try:
        note = parse_json(read_tail(path))
    except ValueError:
        return {}
    return note if _is_valid(note) else {}


def _is_valid(note: Any) -> bool:
    """Return whether this is an event or a note of ours, and has a time."""
    return attempt_log.has_valid_fields(note) and "time" in note and 0 <= note["time"] < LATEST_TIME
