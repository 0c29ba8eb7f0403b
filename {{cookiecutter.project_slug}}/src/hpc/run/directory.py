"""Where a run lives and what lies there. Knows paths, not torch."""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.launch import placement
from hpc.system import files, home

# Set by the process that chose the directory for those it starts: they must not choose again.
CHOSEN = "HPC_RUN_DIR"
LOGS = 16  # folders of loggers that are looked into
ROOM = 16 * 2**20  # bytes that must be free to begin with
# What a training replaces, and what a job does as well. Of a start that came to nothing `OURS` are left, too.
TRAINING = ("made_by.json", "code.diff", "attempts.jsonl", "verdict")
JOB = (*TRAINING, "code", "job.sh", "node.sh", "submitted.json", "checkpoints", "stalled", "successors")
OURS = ("claims", "overrides.json")
SEARCH = "search.json"  # in the folder of an array whose runs belong to a search


class Owner(Protocol):
    """Who may write, as `claim.Claim`."""

    def mine(self) -> bool: ...


def choose(asked: str | None, name: str, now: datetime, environ: Mapping[str, str], step: str = "0") -> Path:
    """The run's directory: the one asked for, the one a parent process chose, the job's, or a fresh name under runs/.

    Chosen once: a clock that each rank read for itself would give each rank a directory of its own. A job's is the same
    after a requeue; `reserve` tells its runs apart. `step`: the number of the srun within its job.
    """
    if asked:
        return home.expand(asked).absolute()
    if CHOSEN in environ:
        return Path(environ[CHOSEN])
    if "SLURM_PROCID" in environ or environ.get("PBS_ENVIRONMENT") == "PBS_BATCH":
        return PROJECT / "runs" / f"{name}_{placement.job_id(environ)}{'' if step == '0' else '.' + step}"
    fresh = PROJECT / "runs" / f"{now:%Y-%m-%d_%H-%M-%S}_{name}_{os.getpid()}"
    return next(path for path in _numbered(fresh) if not path.exists())  # one process may begin two within a second


def _numbered(path: Path) -> Iterator[Path]:
    """The path itself, then path-2, path-3, ..., without end."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def reserve(path: Path, group_readable: bool, goes_on: Callable[[Path], bool]) -> Path:
    """Make a directory that nobody has: this one, or -2, -3 behind its name. Or the first that `goes_on` says is ours.

    A job may start several runs, one after the other or at once, as a person does in the shell that srun gives.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # it is no run's: as this person makes folders
    permit(group_readable)
    for candidate in _numbered(path):
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            if not (candidate.is_dir() and goes_on(candidate)):
                continue
        except OSError:
            pass  # what is wrong is told when it is to be written
        return candidate
    raise AssertionError("there is always a further number")


def create(path: Path, group_readable: bool = False, there: bool = False, room: int = ROOM) -> None:
    """Make the directory, private unless asked otherwise, write a little into it, and tell processes started from here.

    Args:
        there: another node has made it; here it only has to be seen.
        room: bytes that must be free; 0: nothing is written, as the directory above has shown that there is room.

    Raises:
        ConfigError: it cannot be written, is not shared between nodes, or there is no room.
    """
    try:
        if not there:
            path.parent.mkdir(parents=True, exist_ok=True)  # it is no run's: as this person makes folders
        permit(group_readable)
        if not there:
            path.mkdir(exist_ok=True)
        elif not path.is_dir():
            rule = f"rank 0 has made it on another node; {socket.gethostname()} does not see it"
            raise ConfigError("run_dir", path, rule, "run_dir=<on a file system that all nodes share>")
        write_a_little(path, min(room, 1) if there else room)
    except OSError as error:
        what = "no room left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "must be a directory one can write"
        rule = f"{what}: {error.strerror}"
        raise ConfigError("run_dir", path, rule, "run_dir=<a directory>, or make room (files count, too)") from None
    if group_readable and CHOSEN not in os.environ:  # once, and not by each process
        from hpc.run import group_access

        group_access.tell_closed(path)
    os.environ[CHOSEN] = str(path)


def permit(group_readable: bool) -> None:
    """Who may read what this process writes from now on: its user, and the group if that was asked for."""
    os.umask(0o027 if group_readable else 0o077)


def reject_used(path: Path) -> None:
    """Raise `ConfigError` where there is a run already, or what a job would replace."""
    if (path / "config.yaml").exists():
        rule = "there is a run in it, and two cannot share a directory"
        raise ConfigError("run_dir", path, rule, f"python submit.py resume={path}, or another run_dir=")
    reject_others(path, JOB)


def reject_others(path: Path, names: Iterable[str]) -> None:
    """Raise `ConfigError` where a new run would lie around the project, or on files of these names that no run made."""
    fix = "run_dir=<a new directory>"
    if (place := path.resolve()) in (home := PROJECT.resolve(), *home.parents):
        rule = "must not be the project's folder, or one above it: the code of a run lies beside its results"
        raise ConfigError("run_dir", path, rule, fix)
    there = [name for name in names if os.path.lexists(place / name) and not _is_empty_folder(place / name)]
    if there and not any((place / name).exists() for name in OURS):
        rule = f"must not hold files that a run would replace; there are {', '.join(there)}, and not of a run"
        raise ConfigError("run_dir", path, rule, fix)


def _is_empty_folder(path: Path) -> bool:
    """Or a link to one: `checkpoints`, say, on another file system."""
    return path.is_dir() and not any(path.iterdir())


def start(path: Path, attempt: int, environ: Mapping[str, str], from_step: int = 0, **facts: Any) -> None:
    """Note the beginning of an attempt, whose number the claim gave, and take away the verdict of the one before.

    Args:
        from_step: of the checkpoint that it goes on from.
    """
    (path / "verdict").unlink(missing_ok=True)
    job = placement.job_id(environ) or None
    now = {"event": "start", "attempt": attempt, "time": time.time()}
    note(path / "attempts.jsonl", now | {"job": job, "from_step": from_step, **facts})


def end(
    path: Path,
    claim: Owner | None,
    attempt: int,
    step: int,
    outcome: str,
    why: str = "",
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Note the end of an attempt and leave the verdict.

    Raises:
        PermissionError: another attempt has the directory by now.
    """
    if claim and not claim.mine():
        raise PermissionError(errno.EPERM, "another attempt has taken over", str(path))
    now = {"event": "end", "attempt": attempt, "time": time.time()}
    note(path / "attempts.jsonl", now | {"outcome": outcome, "step": step, "why": why, "metrics": dict(metrics or {})})
    verdict(path, attempt, step, outcome, why)


def verdict(path: Path, attempt: int, step: int, outcome: str, why: str = "") -> None:
    """What the job script goes by, whole or not at all and on the disk: `continue`, `finished` or `failed`."""
    aside = path / f".verdict-{socket.gethostname()}-{os.getpid()}"  # any rank may be the one that fails
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(f"attempt {attempt}\nstep {step}\noutcome {outcome}\nwhy {' '.join(why.split())}\n")
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(path / "verdict")
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def events(path: Path) -> list[dict[str, Any]]:
    """What attempts.jsonl holds."""
    return notes(path / "attempts.jsonl")


def starts(path: Path) -> list[dict[str, Any]]:
    """The start events of a run's attempts, in their order."""
    return [event for event in events(path) if event.get("event") == "start"]


def log_dirs(path: Path) -> list[Path]:
    """The folders with curves: tensorboard/, and what the attempts noted last. None lies outside the run directory."""
    noted = [start["log_dirs"] for start in starts(path) if isinstance(start.get("log_dirs"), list)]
    names = dict.fromkeys(name for those in reversed(noted) for name in those if isinstance(name, str))
    found = {path / "tensorboard": None}
    for name in list(names)[:LOGS]:
        with suppress(OSError, ValueError, RuntimeError):  # no name that a folder may have, or a link to itself
            folder = path.resolve() / name
            if folder.is_dir() and folder.resolve().is_relative_to(path.resolve()):
                found[path / folder.resolve().relative_to(path.resolve())] = None
    return list(found)


def notes(file: Path) -> list[dict[str, Any]]:
    """The lines of a file that `note` has written; one that a crash cut short is left out."""
    try:
        lines = files.read_text(file, errors="replace").splitlines()
    except OSError:
        return []
    known = []
    for line in lines:
        try:
            event = files.parse_json(line)
        except ValueError:
            continue
        known += [event] if isinstance(event, dict) else []
    return known


def note(file: Path, event: dict[str, Any]) -> None:
    """Add a line. Raises `OSError`."""
    with files.open_for_append(file) as stream:
        whole = not stream.tell() or os.pread(stream.fileno(), 1, stream.tell() - 1) == b"\n"  # no crash cut it short
        stream.write(("" if whole else "\n").encode() + json.dumps(event).encode() + b"\n")


def write_a_little(path: Path, size: int) -> None:
    """Quotas show when something is written, not before. Raises `OSError`."""
    if not size:
        return
    probe = path / f".room-{socket.gethostname()}-{os.getpid()}"
    try:
        with probe.open("wb") as stream:
            stream.write(b"\0" * size)
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        probe.unlink(missing_ok=True)


def is_of_search(run_dir: Path) -> bool:
    """Return whether this run is a trial of a search: its values are drawn when it first starts."""
    return (run_dir.parent / SEARCH).is_file()
