"""The folder of a job array: its code, the list of its members, and a run directory for each member."""

from collections.abc import Sequence
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.run import directory, snapshot


def reserve(folder: Path, *, run_dirs: Sequence[Path]) -> None:
    """Make the folder of a job array with the list of its members. Raise `ConfigError` if another array uses it."""
    directory.create_run_dir(folder)
    try:
        with (folder / "members").open("x", encoding="utf-8") as members:
            members.writelines(f"{run_dir}\n" for run_dir in run_dirs)
    except FileExistsError:  # a process with the same number on another node, in the same second
        raise ConfigError("run_dir", folder, "must not hold another array", "submit again") from None


def fill(folder: Path, *, run_dirs: Sequence[Path]) -> None:
    """Make a run directory for each member of an array, which shares the code in the array's folder."""
    snapshot.copy_code(folder)
    for run_dir in run_dirs:
        directory.create_run_dir(run_dir, free_bytes=0)
        (run_dir / "code").symlink_to(folder / "code")
