"""Folders of this user alone, on storage that all users of a node share. No torch here."""

import errno
import os
import stat
from pathlib import Path


def make(path: Path) -> Path:
    """Make a folder that only this user can write, or use the one that was made before.

    In a place such as /tmp anybody may have put something under this name first: what would be read from it, or
    executed, would be theirs.

    Raises:
        PermissionError: a link, a file or a folder that others own or can write lies there.
        OSError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check(path)
    return path


def check(path: Path) -> None:
    """Raises `PermissionError` unless this is a folder, not a link to one, of this user that nobody else can write."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        rule = f"{path} must be a folder of this user that nobody else can write; somebody else made what lies there"
        raise PermissionError(errno.EPERM, rule)
