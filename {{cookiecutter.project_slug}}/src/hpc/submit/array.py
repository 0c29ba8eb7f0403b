"""The folder of a job array: its code, the list of its members, and a run directory for each of them."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from hpc.config import project
from hpc.config.errors import ConfigError
from hpc.run import directory, snapshot
from hpc.submit.queue_run import make_ready


def begin(cfg: DictConfig, folder: Path, *, run_dirs: Sequence[Path], wait: bool) -> None:
    """Make the folder, and a run directory for each member, whose code is that of the folder. Raises `ConfigError`."""
    make_ready(cfg, project.PROJECT, wait=wait)
    snapshot.refuse(cfg.dirty_tree)
    directory.create(folder, cfg.group_readable)
    try:
        with (folder / "members").open("x", encoding="utf-8") as members:
            members.writelines(f"{run_dir}\n" for run_dir in run_dirs)
    except FileExistsError:  # a process of the same number on another node, in the same second
        raise ConfigError("run_dir", folder, "another array was begun in it just now", "submit again") from None
    snapshot.take(folder)
    for run_dir in run_dirs:
        directory.create(run_dir, cfg.group_readable, room=0)
        (run_dir / "code").symlink_to(folder / "code")
