"""The log of a run's attempts, `attempts.jsonl`, their phases, and the verdict on the last one.

Other files of JSON lines use it, too.
"""

import errno
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from hpc.launch import placement
from hpc.system import files

MAX_LOG_DIRS = 16  # folders of loggers that are looked into
NUMBER = (int, float)
# Types of the fields that events and other notes have. One with another type is damaged, as a line that a crash cut.
FIELD_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("attempt", "step", "from_step", "trained_step", "trained_batches"), (int,)),
    **dict.fromkeys(("world_size", "gpus_per_node", "nodes", "runs_per_node"), (int,)),
    **dict.fromkeys(("hosts", "log_dirs", "jobs"), (list,)),
    **dict.fromkeys(("metrics", "validated", "logs", "reached", "logger_ids"), (dict,)),
    **dict.fromkeys(("event", "outcome", "why", "code", "launcher", "writer"), (str,)),
    **dict.fromkeys(("job", "scheduler", "error", "after"), (str, type(None))),
    **dict.fromkeys(("time", "seconds"), NUMBER),
}


class WritePermission(Protocol):
    """The right to write into a run directory, as `claim.Claim` is."""

    def may_write(self) -> bool: ...


def record_start(path: Path, attempt: int, *, environ: Mapping[str, str], from_step: int = 0, **facts: Any) -> None:
    """Record the start of an attempt, whose number the claim gave, and remove the verdict on the one before.

    Args:
        from_step: step of the checkpoint that the attempt resumes from.
        facts: what else the event holds.
    """
    (path / "verdict").unlink(missing_ok=True)
    job = placement.job_id(environ) or None
    event = {"event": "start", "attempt": attempt, "time": time.time()}
    append_json_line(path / "attempts.jsonl", event | {"job": job, "from_step": from_step, **facts})


def record_end(
    path: Path,
    claim: WritePermission | None,
    *,
    attempt: int,
    step: int,
    outcome: str,
    why: str = "",
    metrics: Mapping[str, float] | None = None,
    validated: Mapping[str, float] | None = None,
) -> None:
    """Record the end of an attempt and write the verdict.

    Args:
        metrics: of the test or prediction.
        validated: metrics of the last validation, so that a table of runs need not read their curves.

    Raises:
        PermissionError: another attempt has taken over the directory.
    """
    if claim and not claim.may_write():
        raise PermissionError(errno.EPERM, "another attempt has taken over", str(path))
    event = {"event": "end", "attempt": attempt, "time": time.time()}
    event |= {"outcome": outcome, "step": step, "why": why, "metrics": dict(metrics or {})}
    event |= {"validated": dict(validated)} if validated else {}
    append_json_line(path / "attempts.jsonl", event)
    write_verdict(path, attempt, step=step, outcome=outcome, why=why)


def write_verdict(path: Path, attempt: int, *, step: int, outcome: str, why: str = "") -> None:
    """Write the file by which the job script decides how to continue: whole or not at all, and synced to the disk.

    Args:
        outcome: `continue`, `finished` or `failed`.
    """
    text = f"attempt {attempt}\nstep {step}\noutcome {outcome}\nwhy {' '.join(why.split())}\n"
    files.write_atomically(path / "verdict", text, is_durable=True)


def record_phase(run_dir: Path, attempt: int, *, name: str, begin_time: float, step: int) -> None:
    """Record a phase that ends now, at this step, in monitor/phases.jsonl: the report draws it above what nodes did.

    A run without a monitor has none; on a full disk it is lost.

    Args:
        name: start, epoch, validation, checkpoint, test or predict.
        begin_time: unix time.
    """
    times = {"begin": round(begin_time, 3), "end": round(time.time(), 3)}
    with suppress(OSError):
        line = {"what": name, **times, "attempt": attempt, "step": step}
        append_json_line(run_dir / "monitor" / "phases.jsonl", line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events in attempts.jsonl of a run directory."""
    return read_json_lines(path / "attempts.jsonl")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """Return the start events of a run's attempts, in their order."""
    return [event for event in read_events(path) if event.get("event") == "start"]


def curve_folders(path: Path) -> list[Path]:
    """Return the folders with curves: tensorboard/, and those that attempts recorded, newest attempt first.

    None of them lies outside the run directory.
    """
    recorded = [start["log_dirs"] for start in read_starts(path) if isinstance(start.get("log_dirs"), list)]
    names = dict.fromkeys(name for names in reversed(recorded) for name in names if isinstance(name, str))
    folders = {path / "tensorboard": None}
    for name in list(names)[:MAX_LOG_DIRS]:
        with suppress(OSError, ValueError, RuntimeError):  # a name that no folder can have, or a link to itself
            folder = path.resolve() / name
            if folder.is_dir() and folder.resolve().is_relative_to(path.resolve()):
                folders[path / folder.resolve().relative_to(path.resolve())] = None
    return list(folders)


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that `append_json_line` has written; damaged ones are left out."""
    try:
        lines = files.read_text(file, errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        try:
            event = files.parse_json(line)
        except ValueError:
            continue
        events += [event] if has_valid_fields(event) else []
    return events


def has_valid_fields(note: Any) -> bool:
    """Return whether this is a note of ours: a dict with values of the types that they must have."""
    if not isinstance(note, dict) or any(type(note[key]) not in FIELD_TYPES[key] for key in note.keys() & FIELD_TYPES):
        return False
    positions = [*note.get("logs", {}).values(), *note.get("reached", {}).values()]
    return all(type(position) is int for position in positions)


def append_json_line(file: Path, event: dict[str, Any]) -> None:
    """Append an event as a line of JSON. Raises `OSError`."""
    with files.open_for_append(file) as stream:
        is_complete = not stream.tell() or os.pread(stream.fileno(), 1, stream.tell() - 1) == b"\n"  # no crash cut it
        stream.write(("" if is_complete else "\n").encode() + json.dumps(event).encode() + b"\n")
