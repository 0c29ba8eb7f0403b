"""The directory of a run: its place, how it is made, and who may read it. Imports no torch."""

import errno
import os
import shutil
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import count
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.config.project import PROJECT
from hpc.launch import placement
from hpc.system import home

# Set by the process that chose the directory for those it starts: they must not choose again.
RUN_DIR_VARIABLE = "HPC_RUN_DIR"
MIN_FREE_BYTES = 16 * 2**20  # that must be free when a run starts
# Files that a training replaces, those that a job replaces, and those that a start which failed leaves behind.
TRAINING_FILES = ("made_by.json", "code.diff", "attempts.jsonl", "verdict", "predictions", "predictions.pt")
JOB_FILES = (
    *TRAINING_FILES,
    "code",
    "code.part",
    "job.sh",
    "submitted.json",
    "checkpoints",
    "stalled",
    "ended",
    "successors",
)
FAILED_START_FILES = ("claims", "overrides.json")
SEARCH_FILE = "search.json"  # in the folder of an array whose runs belong to a search


def choose_run_dir(
    requested: str | None, name: str, *, now: datetime, environ: Mapping[str, str], step: str = "0"
) -> Path:
    """Return the run's directory: the requested one, the one a parent process chose, the job's, or a new one in runs/.

    It is chosen once: if each rank read its own clock, each would get a directory of its own. A job's directory is the
    same after a requeue; `reserve_run_dir` tells the runs of a job apart.

    Args:
        step: number of the srun within its job.
    """
    if requested:
        return home.expand(requested).absolute()
    if RUN_DIR_VARIABLE in environ:
        return Path(environ[RUN_DIR_VARIABLE])
    if "SLURM_PROCID" in environ or environ.get("PBS_ENVIRONMENT") == "PBS_BATCH":
        return PROJECT / "runs" / f"{name}_{placement.job_id(environ)}{'' if step == '0' else '.' + step}"
    path = PROJECT / "runs" / f"{now:%Y-%m-%d_%H-%M-%S}_{name}_{os.getpid()}"
    return next(path for path in _numbered(path) if not path.exists())  # one process may start two within a second


def _numbered(path: Path) -> Iterator[Path]:
    """Yield the path itself, then path-2, path-3, ..., without end."""
    yield path
    for number in count(2):
        yield path.with_name(f"{path.name}-{number}")


def reserve_run_dir(path: Path) -> Path:
    """Make a directory that did not exist, and return its path: `path`, or path-2, path-3, ...

    A job may start several runs, one after the other or at once, as a person does in a shell that srun gives.
    """
    for candidate in _numbered(path):
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            pass  # `create_run_dir` reports it
        return candidate
    raise AssertionError("there is always a further number")


def create_run_dir(path: Path, *, is_made: bool = False, free_bytes: int = MIN_FREE_BYTES) -> None:
    """Make the directory, write a test file, and set HPC_RUN_DIR for child processes.

    Args:
        is_made: another node has made it; this node only has to see it.
        free_bytes: that must be free; 0: nothing is written, as the directory above has shown that there is space.

    Raises:
        ConfigError: it cannot be written, is not shared between nodes, or the disk is full.
    """
    try:
        if not is_made:
            path.mkdir(parents=True, exist_ok=True)
        elif not path.is_dir():
            rule = f"must be visible from all nodes: rank 0 created it, but {socket.gethostname()} does not see it"
            raise ConfigError("run_dir", path, rule, "run_dir=<on a file system that all nodes share>")
        write_probe_file(path, min(free_bytes, 1) if is_made else free_bytes)
    except OSError as error:
        fix = "run_dir=<a directory that you may write to>"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "free some space (a quota may also limit the number of files), or run_dir=<on another file system>"
        given = f"{path} ({error.strerror or error})"
        raise ConfigError("run_dir", given, "must be a folder that can be written", fix) from None
    os.environ[RUN_DIR_VARIABLE] = str(path)


def reject_used(path: Path) -> None:
    """Raise `ConfigError` where the directory holds a run, or files that a job would replace."""
    if (path / "config.yaml").exists():
        rule = "must not hold another run"
        raise ConfigError("run_dir", path, rule, f"python submit.py resume={path}, or run_dir=<a new directory>")
    reject_foreign_files(path, JOB_FILES)


def remove_written(path: Path, before: Collection[str]) -> None:
    """Remove a new run that was not submitted: its directory, or its files in one that was there before.

    Args:
        before: the names in the directory, empty if it did not exist; these stay.
    """
    if not before:
        shutil.rmtree(path, ignore_errors=True)
    for name in {*JOB_FILES, *FAILED_START_FILES, "config.yaml"} - {"checkpoints", *before}:
        shutil.rmtree(path / name, ignore_errors=True)
        (path / name).unlink(missing_ok=True)


def reject_foreign_files(path: Path, names: Iterable[str]) -> None:
    """Raise `ConfigError` where the project lies in the directory, or files of these names that no run made."""
    fix, resolved, project = "run_dir=<a new directory>", path.resolve(), PROJECT.resolve()
    if project == resolved / "code" and (path / "made_by.json").is_file():  # this program is the run's own copy
        return
    if resolved in (project, *project.parents):
        rule = "must not be the project's folder or one above it: the code of a run lies beside its results"
        raise ConfigError("run_dir", path, rule, fix)
    foreign = [name for name in names if os.path.lexists(resolved / name) and not _is_empty_folder(resolved / name)]
    if foreign and not any((resolved / name).exists() for name in FAILED_START_FILES):
        rule = f"must not hold files that a run would replace, but no run made these: {', '.join(foreign)}"
        raise ConfigError("run_dir", path, rule, fix)


def _is_empty_folder(path: Path) -> bool:
    """Return whether this is an empty folder or a link to one, as `checkpoints` on another file system may be."""
    return path.is_dir() and not any(path.iterdir())


def write_probe_file(folder: Path, num_bytes: int) -> None:
    """Write a file of this size and remove it: a quota shows only when something is written. Raises `OSError`."""
    if not num_bytes:
        return
    probe = folder / f".room-{socket.gethostname()}-{os.getpid()}"
    try:
        with probe.open("wb") as stream:
            stream.write(b"\0" * num_bytes)
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        probe.unlink(missing_ok=True)


def is_search_trial(run_dir: Path) -> bool:
    """Return whether this run is a trial of a search, whose values are drawn when it first starts."""
    return (run_dir.parent / SEARCH_FILE).is_file()
