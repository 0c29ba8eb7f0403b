"""Run directories that a group may read."""

import os
import shlex
import stat
import sys
from contextlib import suppress
from pathlib import Path

from hpc.config.errors import make_printable


def tell_closed(path: Path) -> None:
    """Say where the group cannot come to a directory that it may read: that folder may hold more than runs."""
    its_group = path.stat().st_gid
    for folder in path.resolve().parents:
        who, bit = ("g", 0o010) if (facts := folder.stat()).st_gid == its_group else ("o", 0o001)
        if not facts.st_mode & bit:
            how = shlex.join(["chmod", f"{who}+x", str(folder)])
            print(
                make_printable(f"note: group_readable=true, but your group cannot enter {folder}: {how}"),
                file=sys.stderr,
            )


def let_in(path: Path, group_readable: bool) -> None:
    """Let all that is there be readable as if it was written now. What is somebody else's stays as it is."""
    for folder, _, names in os.walk(path):
        for file in (Path(folder), *(Path(folder, name) for name in names)):
            with suppress(OSError):
                mode = file.lstat().st_mode
                if not stat.S_ISLNK(mode):
                    file.chmod(stat.S_IMODE(mode | (mode & 0o500) >> 3 if group_readable else mode & ~0o077))
