"""What runs have left in their directories, read again: attempts, errors, scalars. Asks nobody; imports no torch."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from . import rundir

SKEW = 5  # seconds that the clocks of nodes may differ
TAIL = 4 * 2**20  # bytes of a log that are read
BY_SUBMIT = {"submitted.json", "job.sh", "node.sh", "config.yaml"}  # no signs of life of a run
LABEL = re.compile(r"(?:\s*(\d+): ?)?(?:\[rank\d+\]: ?)?")  # before each line: srun's, and torch's
# After this line of a log comes another attempt of the same job.
REQUEUED = re.compile(r"CANCELLED AT \S+ DUE TO (JOB REQUEUE|PREEMPTION|NODE FAILURE)")
# What the programs around the ranks say; job.sh refuses by `asked for ..., PBS gave ...`.
ERROR = re.compile(r"(slurmstepd|srun): error|.*CANCELLED AT .* DUE TO TIME LIMIT|.*PBS: job killed|job\.sh: asked")


@dataclass(frozen=True)
class Attempt:
    """One start of a run. Times are unix times."""

    start: float
    job: str | None
    hosts: list[str]
    end: dict[str, Any] | None  # what attempts.jsonl says of it


@dataclass(frozen=True)
class Run:
    """What lies in a run directory."""

    path: Path
    name: str
    owner: int  # user id
    attempts: list[Attempt]
    verdict: str | None
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
    said = re.search(r"(?m)^outcome (\w+)$", _text(path / "verdict"))
    verdict = said[1] if said else None
    return Run(path, name, path.stat().st_uid, attempts, verdict, submitted, jobs, job, member or 0)


def first_error(run: Run, logs_too: bool) -> str:
    """The earliest error that a rank left since the last start, else the first that the job's logs tell; or nothing."""
    return _raised(run) or (_logged(run) if logs_too else "")


def progress(run: Run) -> tuple[int | None, str]:
    """The last step, and one metric: of the last test, else of the last validation."""
    ends = [attempt.end for attempt in run.attempts if attempt.end]
    last = ends[-1] if ends else {}
    metrics = last.get("metrics", {})
    tested = {k: v for k, v in metrics.items() if k.startswith("test/") and isinstance(v, int | float)}
    step = last.get("step")
    if not run.attempts or (tested and run.attempts[-1].end):
        return step, _one(tested)
    newest, validated = _scalars(run.path / "tensorboard")
    return step if run.attempts[-1].end or newest is None else newest, _one(tested or validated)


def node_hours(run: Run, runs_till: float | None) -> float:
    """Time x nodes, summed over attempts. One that left no end lasted until its last sign of life before the next.

    Args:
        runs_till: now, where the scheduler says that the last attempt still runs.
    """
    signs = changes(run) if any(not attempt.end for attempt in run.attempts) else []
    used = 0.0
    for attempt, following in zip_longest(run.attempts, run.attempts[1:]):
        if attempt.end:
            until = attempt.end["time"]
        elif following:  # a requeued job waits in between
            until = max((when for when in signs if attempt.start <= when <= following.start), default=following.start)
        else:
            until = runs_till or max(signs, default=0)
        used += max(until - attempt.start, 0) * max(len(attempt.hosts), 1)
    return used / 3600


def changes(run: Run) -> list[float]:
    """When the files that the run itself writes were changed last."""
    files = [path for job in {attempt.job for attempt in run.attempts} for path in _logs(run, job)]
    for folder, inside, names in os.walk(run.path):
        inside[:] = [name for name in inside if name != "code" and name[0] != "."]
        ours = [name for name in names if name not in BY_SUBMIT and not name.endswith(".log")]
        files += [Path(folder, name) for name in ours]
    return [when for path in files if (when := _changed(path))]


def _raised(run: Run) -> str:
    """The earliest of the errors that ranks have left since the last start."""
    raised = []
    for path in run.path.glob("errors/rank-*.txt"):
        text = _text(path)
        if found := re.match(r"(\d+(?:\.\d+)?) (.+)", text):
            rule = re.search(r"(?m)^\s*rule: (.+)", text) if found[2].startswith("Refused") else None
            said = f"{path.stem.replace('-', ' ')}: {found[2]}" + (f": {rule[1]}" if rule else "")
            raised.append((float(found[1]), said))
    return min(((when, said) for when, said in raised if when >= run.since - SKEW), default=(0, ""))[1]


def _logged(run: Run) -> str:
    """The first line of the job's logs, after its last requeue, that tells an error."""
    for path in _logs(run, run.job):
        text = [line for line in _text(path).splitlines() if line.strip()]
        start = max((number + 1 for number, line in enumerate(text) if REQUEUED.search(line)), default=0)
        # srun, which is not buffered, tells that a rank has ended before that rank's own last words arrive.
        if said := min(_errors(text[start:]), key=lambda said: said.startswith("srun: error"), default=""):
            return said
    return ""


def _errors(text: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(text):
        label, said = _unlabelled(line)
        if said.startswith(("refused:", "Traceback (most recent")):
            # The ranks of an srun talk in between: only what this one says next counts.
            rest = (more for other, more in map(_unlabelled, text[number + 1 :]) if other == label and more.strip())
            if said.startswith("Traceback"):
                yield next((more for more in rest if not more.startswith(" ")), said)
            else:
                rule = next(rest, "").strip()
                yield f"{said}, {rule}" if rule.startswith("rule:") else said
        elif ERROR.match(said):
            yield said


def _unlabelled(line: str) -> tuple[str | None, str]:
    """The rank that says it, as far as srun tells, and what it says."""
    found = LABEL.match(line)
    return (found[1], line[found.end() :]) if found else (None, line)


def _logs(run: Run, job: str | None) -> list[Path]:
    """Those of one job: of its nodes (PBS), of its script; of a member of a Slurm array, in the sweep's folder."""
    number = re.match(r"\d+", job or "")
    if not number or not job:
        return []
    script = run.path.parent / f"job-{job}.log" if "_" in job else run.path / f"job-{number[0]}.log"
    return [*sorted(run.path.glob(f"node-*-{number[0]}.log")), script]


def _one(metrics: Mapping[str, float]) -> str:
    """The metric that says most: not the loss where there is another."""
    names = [name for name in metrics if not name.endswith("loss")] or list(metrics)
    return f"{names[-1]} {metrics[names[-1]]:.4g}" if names else "-"


def _scalars(folder: Path) -> tuple[int | None, dict[str, float]]:
    """The step of the newest scalar, and the newest validation metrics, from TensorBoard's files."""
    files = sorted(folder.glob("events.out.tfevents.*"), reverse=True)  # their names begin with the time
    step, validated = None, {}
    for file in files:
        steps, values = _events(file)
        step = steps if step is None else step
        validated = validated or {tag: value for tag, value in values.items() if tag.startswith("val/")}
        if step is not None and validated:
            break
    return step, validated


def _events(file: Path) -> tuple[int | None, dict[str, float]]:
    """The last step and the last value of each scalar in one file, as far as it can be read."""
    step, values = None, {}
    with suppress(Exception):  # whatever comes of a damaged file, or of a missing library: the table can do without
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    step, values[value.tag] = event.step, value.simple_value
    return step, values


def _is_run(folder: Path) -> bool:
    made = (folder / "config.yaml").exists() and (folder / "job.sh").exists()
    return made or (folder / "attempts.jsonl").exists() or any(folder.glob("errors/rank-*.txt"))


def _member(path: Path) -> int | None:
    """Index of a run in its sweep."""
    names = [Path(line).name for line in _text(path.parent / "members").splitlines()]
    return names.index(path.name) if path.name in names else None


def _number(job: str, scheduler: str | None, index: int | None) -> str:
    """The job as the scheduler prints it, without the server: `29[].server` and member 3 give `29[3]`."""
    number = str(job).split(".")[0]
    if index is None:
        return number
    return f"{number}_{index}" if scheduler == "slurm" else number.replace("[]", f"[{index}]")


def _attempts(path: Path) -> list[Attempt]:
    try:
        events = [event for event in rundir.events(path) if _sound(event, hosts=list, metrics=dict)]
    except ValueError:  # not UTF-8
        return []
    ends = {event.get("attempt"): event for event in events if event.get("event") == "end"}
    return [
        Attempt(event["time"], event.get("job"), event.get("hosts", []), ends.get(event.get("attempt")))
        for event in events
        if event.get("event") == "start"
    ]


def _json(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(_text(path))
    except ValueError:
        return {}
    return note if _sound(note, jobs=list) else {}


def _sound(note: Any, **kinds: type) -> bool:
    """Is it one of ours? It has a time, and lists and dicts where they belong."""
    if not isinstance(note, dict) or not isinstance(note.get("time"), int | float):
        return False
    return all(isinstance(note.get(key, kind()), kind) for key, kind in kinds.items())


def _text(path: Path) -> str:
    """The end of a text file; nothing where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
