"""The checkpoint that `ckpt=` means: the path of one, or a run directory, whose best one is looked up at each start."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.system import home


def find_checkpoint(ckpt: str) -> str:
    """Return the best checkpoint of the run in this folder, or its last one if it keeps no best.

    Any other path is returned unchanged.
    """
    return next((link for link in links_of_run(ckpt) if _exists(link)), ckpt)


def links_of_run(run_dir: str) -> list[str]:
    """Return the paths of a run's best and of its last checkpoint."""
    return [f"{run_dir.rstrip('/')}/checkpoints/{name}" for name in ("best.ckpt", "last.ckpt")]


def reject_missing(ckpt: str, awaited: Sequence[Path]) -> None:
    """Raise `ConfigError` unless there is such a checkpoint, or will be once the awaited runs are finished.

    Args:
        awaited: resolved run directories.
    """
    if not _exists(ckpt):
        raise ConfigError("ckpt", ckpt, "must be an existing file or folder", "ckpt=<checkpoint of a run>")
    is_run = _exists(f"{ckpt}/job.sh") or _exists(f"{ckpt}/attempts.jsonl")
    if is_run and find_checkpoint(ckpt) == ckpt and home.expand(ckpt).resolve() not in awaited:
        rule = "must be a run that has a checkpoint, and this one has none yet"
        fix = f"python submit.py --after {shlex.quote(ckpt)}, and these words: the job starts once that run is finished"
        raise ConfigError("ckpt", ckpt, rule, fix)


def _exists(path: str) -> bool:
    try:
        return home.expand(path).exists()
    except (OSError, ValueError):  # a folder that may not be read, or a name that no file can have
        return False
