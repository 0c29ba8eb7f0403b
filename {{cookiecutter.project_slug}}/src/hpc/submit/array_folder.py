"""The folder of a job array: its code, the list of its members, and a run directory for each member."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from hpc.config import project
from hpc.config.errors import ConfigError
from hpc.run import directory, snapshot
from hpc.submit.queue_run import prepare_submission


def create_array_folder(cfg: DictConfig, folder: Path, *, run_dirs: Sequence[Path], wait: bool) -> None:
    """Make the folder of a job array, and a run directory for each member, which shares the folder's code.

    Raises:
        ConfigError: nothing can be submitted from here, or another array uses the folder.
    """
    prepare_submission(cfg, project.PROJECT, wait=wait)
    snapshot.reject_unsuitable_code(cfg.dirty_tree)
    directory.create_run_dir(folder, group_readable=cfg.group_readable)
    try:
        with (folder / "members").open("x", encoding="utf-8") as members:
            members.writelines(f"{run_dir}\n" for run_dir in run_dirs)
    except FileExistsError:  # a process with the same number on another node, in the same second
        raise ConfigError("run_dir", folder, "must not hold another array", "submit again") from None
    snapshot.copy_code(folder)
    for run_dir in run_dirs:
        directory.create_run_dir(run_dir, group_readable=cfg.group_readable, free_bytes=0)
        (run_dir / "code").symlink_to(folder / "code")
