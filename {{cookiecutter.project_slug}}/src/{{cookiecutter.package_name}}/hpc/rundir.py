"""Where a run lives and what lies there. Knows paths, not torch."""

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from .config import PROJECT, Refused

# Set by the process that chose the directory for those it starts: they must not choose again.
CHOSEN = "HPC_RUN_DIR"


def choose(asked: str | None, name: str, now: datetime, environ: Mapping[str, str]) -> Path:
    """The run's directory: the one asked for, the one a parent process chose, the job's, or a fresh name under runs/.

    Chosen once: a clock that each rank read for itself would give each rank a directory of its own.
    """
    if asked:
        return Path(asked).expanduser().absolute()
    if CHOSEN in environ:
        return Path(environ[CHOSEN])
    if "SLURM_PROCID" in environ:  # srun started the ranks: what they have in common is the job
        return PROJECT / "runs" / f"{name}_{environ['SLURM_JOB_ID']}"
    return PROJECT / "runs" / f"{now:%Y-%m-%d_%H-%M-%S}_{name}_{os.getpid()}"


def create(path: Path) -> None:
    """Make the directory and tell the processes started from here.

    Raises:
        Refused: it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "no permission to write")
    except OSError as error:
        raise Refused(
            "run_dir", path, f"must be a directory one can write: {error.strerror}", "run_dir=<a directory>"
        ) from None
    os.environ[CHOSEN] = str(path)
