"""Folders that only this user can write, on storage that all users of a node share. Imports no torch."""

import errno
import os
import stat
from pathlib import Path


def make(path: Path) -> Path:
    """Create a folder that only this user can write, or accept the one that was created before.

    In a place such as /tmp, somebody else may have created something under this name first. Whatever is read from it
    or executed would then be theirs.

    Raises:
        PermissionError: a link, a file, or a folder that others own or can write lies there.
        OSError: the folder cannot be created.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        check(path)
    return path


def check(path: Path) -> None:
    """Raise `PermissionError` unless the path is a folder of this user, not a link, that nobody else can write."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        rule = f"{path} must be a folder that this user owns and nobody else can write; somebody else created it"
        raise PermissionError(errno.EPERM, rule)
