"""What ran and how: from run directories, and the scheduler where there is one, to a table. Imports no torch."""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any

from . import rundir, states
from .states import State

WIDTH = 120  # columns of a terminal
RECENT = 600  # seconds: a run that wrote something since then is probably alive
SKEW = 5  # seconds that the clocks of nodes may differ
TAIL = 4 * 2**20  # bytes of a log that are read
OUTCOMES = {"finished": "finished", "continue": "to be continued", "failed": "failed"}
BY_SUBMIT = {"submitted.json", "job.sh", "node.sh", "config.yaml", "members"}  # not signs of life of a run
# After this line of a log comes another attempt of the same job.
REQUEUED = re.compile(r"CANCELLED AT \S+ DUE TO (JOB REQUEUE|PREEMPTION|NODE FAILURE)")
ERROR = re.compile(r"(slurmstepd|srun): error|(=>> )?PBS: job killed|job\.sh: refuse|.*CANCELLED AT .* DUE TO TIME LIMIT")


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
    attempts: list[Attempt]
    submitted: dict[str, Any]  # the later of its own submitted.json and its sweep's
    jobs: list[str]  # those submitted, in order, and the one that ran last
    verdict: str | None
    index: int  # in its sweep

    @property
    def begun(self) -> float:
        """When it was last submitted or, by hand, started."""
        return self.submitted.get("time") or (self.attempts[-1].start if self.attempts else 0)

    @property
    def since(self) -> float:
        """What was written before this time concerns an earlier attempt."""
        return max(self.submitted.get("time", 0), self.attempts[-1].start if self.attempts else 0)

    @property
    def finished(self) -> bool:
        ended = self.attempts[-1].end if self.attempts else None
        return self.verdict == "finished" and not (ended and self.submitted.get("time", 0) > ended["time"])

    @property
    def scheduler(self) -> str:
        """The one that was asked; for a job made by hand, the one that is here."""
        asked = self.submitted.get("scheduler")
        return asked if asked in states.COMMAND else "slurm" if which(states.COMMAND["slurm"]) else "pbs"


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


def lines(places: Sequence[Path], now: float | None = None) -> list[str]:
    """The table of all runs at or below these places, newest last."""
    found = {place: find(place) for place in places}
    runs = sorted((run for some in found.values() for run in some), key=lambda run: (run.begun, run.path.parent, run.index))
    if not runs:
        return [f"no run in {' '.join(map(str, places))} yet: python train.py or python submit.py makes one"]
    told = {name: _told(name, [run for run in runs if run.scheduler == name]) for name in states.COMMAND}
    rows = [row(run, told[run.scheduler], now or time.time()) for run in runs]
    silent = {run.scheduler for run in runs if run.jobs and not run.finished and told[run.scheduler] is None}
    commands = [states.COMMAND[name] for name in silent if which(states.COMMAND[name])]
    return [
        *(f"{_clean(place)}: no run" for place, some in found.items() if not some),
        *table(rows),
        *(f"{command} does not answer: states are as the run directories tell" for command in commands),
    ]


def find(place: Path, name: str = "", depth: int = 2) -> list[Run]:
    """The run at this place, or those in it and in the sweeps in it; what cannot be read is passed over."""
    try:
        if _is_run(place):
            return [read(place, name or place.resolve().name)]
        inside = sorted(child for child in place.iterdir() if child.is_dir() and child.name[0] != "." and depth)
    except (OSError, ValueError):
        return []
    above = name or (place.resolve().name if (place / "members").exists() else "")
    return [run for child in inside for run in find(child, f"{above}/{child.name}".lstrip("/"), depth - 1)]


def read(path: Path, name: str) -> Run:
    """A run directory. Damaged files count as missing."""
    index, sweep = _place_in_sweep(path)
    notes = [(_json(path / "submitted.json"), None), (_json(path.parent / "submitted.json") if sweep else {}, index)]
    submitted, member = max(notes, key=lambda note: note[0].get("time", 0))
    jobs = [_number(job, submitted.get("scheduler"), member) for job in submitted.get("jobs", [])]
    attempts = _attempts(path)
    if attempts and attempts[-1].job and attempts[-1].job not in jobs:
        jobs.append(attempts[-1].job)
    said = re.search(r"(?m)^outcome (\w+)$", _text(path / "verdict"))
    return Run(path, name, attempts, submitted, jobs, said[1] if said else None, index)


def row(run: Run, told: dict[str, State] | None, now: float) -> Row:
    """One run, given what its scheduler knows (None: nobody to ask)."""
    job, state = _judged(run, told, now)
    step, metric = _progress(run)
    short = f"{state.word} ({state.why})" if state.why and len(state.why) <= 40 else state.word
    note = "" if short != state.word else state.why
    if state.word != "finished":
        note = note or _first_raised(run) or ("" if _fine(state) else _first_logged(run, job))
    hosts = len(run.attempts[-1].hosts) if run.attempts else 0
    hours = _node_hours(run, state.active and state.word in ("running", "completing"), now)
    return Row(
        run.name, job or "-", short, len(run.attempts), hosts or run.submitted.get("nodes"), step, metric, hours, note
    )


def table(rows: Sequence[Row]) -> list[str]:
    """A line per run, at most 120 columns wide, notes on lines of their own; so are names that leave no room."""
    titles = ("job", "state", "attempts", "nodes", "step", "metric", "node-hours")
    cells = [titles, *([_cell(getattr(row, title.replace("-", "_"))) for title in titles] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    names = ["run", *(_clean(row.run) for row in rows)]
    room = min(max(map(len, names)), max(WIDTH - sum(widths) - 2 * len(widths), len("run")))
    text = []
    for name, note, line in zip(names, ["", *(_clean(row.note) for row in rows)], cells, strict=True):
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


def _told(scheduler: str, runs: Sequence[Run]) -> dict[str, State] | None:
    """One question for all runs that are not known to be finished."""
    asked = [run for run in runs if run.jobs and not run.finished]
    if not asked:
        return None
    return states.ask(scheduler, {job for run in asked for job in run.jobs}, {_owner(run.path) for run in asked})


def _judged(run: Run, told: dict[str, State] | None, now: float) -> tuple[str | None, State]:
    """The job that counts and the run's state. What is certain first; the directory where the scheduler knows nothing."""
    last = run.attempts[-1] if run.attempts else None
    job = (last and last.job) or next(iter(run.jobs), None)
    if run.finished:
        return job, State("finished")
    known = {job: told[job] for job in run.jobs if job in told} if told else {}
    for job_, state in known.items():
        if state.active:
            return job_, state
    error = run.submitted.get("error")
    if error and run.submitted["time"] >= run.since:
        return job, State("not submitted", str(error).removeprefix("not submitted").removeprefix(": "))
    if run.verdict in OUTCOMES:
        return job, State(OUTCOMES[run.verdict])
    if job in known:
        return job, known[job]
    return job, State(_guessed(run, last, asked=told is not None and job is not None, now=now))


def _guessed(run: Run, last: Attempt | None, asked: bool, now: float) -> str:
    """The state when there is no verdict, and no scheduler or (`asked`) one that does not know the job."""
    if _first_raised(run):
        return "failed"
    if last and last.end:
        return OUTCOMES.get(last.end.get("outcome", ""), "ended")
    if last:
        return "died" if asked or now - max(_changes(run), default=0) > RECENT else "running?"
    if run.jobs:
        return "did not start" if asked else "submitted"
    return "not submitted"


def _fine(state: State) -> bool:
    return state.active or state.word in ("to be continued", "completed", "submitted", "not submitted", "running?")


# -- What went wrong first --


def _first_raised(run: Run) -> str:
    """The earliest of the errors that ranks have left since the last start."""
    raised = []
    for path in run.path.glob("errors/rank-*.txt"):
        text = _text(path)
        if found := re.match(r"(\d+(?:\.\d+)?) (.+)", text):
            rule = re.search(r"(?m)^\s*rule: (.+)", text) if found[2].startswith("Refused") else None
            said = f"{path.stem.replace('-', ' ')}: {found[2]}" + (f": {rule[1]}" if rule else "")
            raised.append((float(found[1]), said))
    return min(((when, said) for when, said in raised if when >= run.since - SKEW), default=(0, ""))[1]


def _first_logged(run: Run, job: str | None) -> str:
    """The first line of the job's logs, after its last requeue, that tells an error."""
    for path in _logs(run, job):
        text = [line for line in _text(path).splitlines() if line.strip()]
        start = max((number + 1 for number, line in enumerate(text) if REQUEUED.search(line)), default=0)
        if said := next(_errors(text[start:]), ""):
            return said
    return ""


def _errors(text: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(text):
        label, said = _unlabelled(line)
        # The ranks of an srun talk in between: only what this one says next counts.
        if said.startswith(("refused:", "Traceback (most recent")):
            rest = [more for other, more in map(_unlabelled, text[number + 1 :]) if other == label]
            if said.startswith("Traceback"):
                yield next((more for more in rest if not more.startswith(" ")), said)
            else:
                rule = next((more.strip() for more in rest[:1] if more.strip().startswith("rule:")), "")
                yield f"{said}, {rule}" if rule else said
        elif ERROR.match(said):
            yield said


def _unlabelled(line: str) -> tuple[str, str]:
    """`3: text` as srun --label writes it: the rank and its text."""
    found = re.match(r"\s*(\d+): ?(.*)", line)
    return (found[1], found[2]) if found else ("", line)


def _logs(run: Run, job: str | None) -> list[Path]:
    """Those of one job: of its nodes (PBS), of the script, and of a sweep's member (Slurm: in the sweep's folder)."""
    number = re.match(r"\d+", job or "")
    if not number or not job:
        return []
    own = [run.path / f"job-{name}.log" for name in dict.fromkeys([job, number[0]])]
    return [*sorted(run.path.glob(f"node-*-{number[0]}.log")), *own, run.path.parent / f"job-{job}.log"]


# -- How far it got, and for how much --


def _progress(run: Run) -> tuple[int | None, str]:
    """The last step, and one metric: of the last test, else of the last validation."""
    ends = [attempt.end for attempt in run.attempts if attempt.end]
    tested = {k: v for end in ends[-1:] for k, v in (end.get("metrics") or {}).items() if k.startswith("test/")}
    step = ends[-1].get("step") if ends else None
    if not run.attempts or (tested and run.attempts[-1].end):
        return step, _one(tested)
    newest, validated = _scalars(run.path / "tensorboard")
    return step if run.attempts[-1].end or newest is None else newest, _one(tested or validated)


def _one(metrics: dict[str, float]) -> str:
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
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    step, values[value.tag] = event.step, value.simple_value
    except Exception:  # whatever comes of a damaged file, or of a missing library: the table can do without
        pass
    return step, values


def _node_hours(run: Run, runs_on: bool, now: float) -> float:
    """Time x nodes, summed over attempts. One that left no end lasted until the last sign of life before the next."""
    used, changes = 0.0, None
    for attempt, following in zip(run.attempts, [*run.attempts[1:], None], strict=True):
        if attempt.end:
            until = attempt.end["time"]
        elif runs_on and not following:
            until = now
        else:
            changes = changes or _changes(run)
            limit = following.start if following else now
            signs = [when for when in changes if attempt.start <= when <= limit]
            until = max(signs, default=limit if following else attempt.start)
        used += max(until - attempt.start, 0) * max(len(attempt.hosts), 1)
    return used / 3600


def _changes(run: Run) -> list[float]:
    """When the files that the run itself writes were changed last."""
    files = [path for job in {attempt.job for attempt in run.attempts} for path in _logs(run, job)]
    for folder, inside, names in os.walk(run.path):
        inside[:] = [name for name in inside if name != "code" and name[0] != "."]
        ours = [name for name in names if name not in BY_SUBMIT and not name.endswith(".log")]
        files += [Path(folder, name) for name in ours]
    return [when for path in files if (when := _changed(path))]


# -- Files that may be missing, damaged or somebody else's --


def _is_run(folder: Path) -> bool:
    made = (folder / "config.yaml").exists() and (folder / "job.sh").exists()
    return made or (folder / "attempts.jsonl").exists() or any(folder.glob("errors/rank-*.txt"))


def _place_in_sweep(path: Path) -> tuple[int, bool]:
    names = [Path(line).name for line in _text(path.parent / "members").splitlines()]
    return (names.index(path.name), True) if path.name in names else (0, False)


def _number(job: str, scheduler: str | None, member: int | None) -> str:
    """The job as the scheduler prints it, without the server: `29[].server` and member 3 give `29[3]`."""
    number = str(job).split(".")[0]
    if member is None:
        return number
    return f"{number}_{member}" if scheduler == "slurm" else number.replace("[]", f"[{member}]")


def _attempts(path: Path) -> list[Attempt]:
    try:
        events = [event for event in rundir.events(path) if isinstance(event.get("time"), int | float)]
    except (ValueError, AttributeError):
        return []  # not UTF-8, or JSON of somebody else
    ends = {event.get("attempt"): event for event in events if event.get("event") == "end"}
    return [
        Attempt(event["time"], event.get("job"), list(event.get("hosts") or []), ends.get(event.get("attempt")))
        for event in events
        if event.get("event") == "start"
    ]


def _json(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(_text(path))
    except ValueError:
        return {}
    return note if isinstance(note, dict) and isinstance(note.get("time"), int | float) else {}


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


def _owner(path: Path) -> int:
    return path.stat().st_uid


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else _clean(value)


def _clean(value: object) -> str:
    """On one line, without what would steer a terminal."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return text if len(text) <= 400 else f"{text[:400]} ..."
