"""Run directories that a group may read."""

import os
import shlex
import stat
import sys
from contextlib import suppress
from pathlib import Path

from hpc.config.errors import make_printable


def warn_of_closed_folders(path: Path) -> None:
    """Print which folders above keep the group out of a directory that it may read.

    They stay as they are: they may hold more than runs.
    """
    group = path.stat().st_gid
    for folder in path.resolve().parents:
        who, bit = ("g", 0o010) if (facts := folder.stat()).st_gid == group else ("o", 0o001)
        if not facts.st_mode & bit:
            command = shlex.join(["chmod", f"{who}+x", str(folder)])
            note = f"note: group_readable=true, but your group cannot enter {folder}. Try: {command}"
            print(make_printable(note), file=sys.stderr)


def set_group_access(path: Path, *, group_readable: bool) -> None:
    """Give or take the group's right to read everything in a directory. Other people's files stay as they are."""
    for folder, _, names in os.walk(path):
        for file in (Path(folder), *(Path(folder, name) for name in names)):
            with suppress(OSError):
                mode = file.lstat().st_mode
                if not stat.S_ISLNK(mode):
                    file.chmod(stat.S_IMODE(mode | (mode & 0o500) >> 3 if group_readable else mode & ~0o077))
