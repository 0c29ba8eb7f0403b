"""Packed files on the node's own storage: copied there once per node, before training. No torch here."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import cache

from ..config import Refused
from .parts import Parts, verify

LOOKED_AT = 8  # parts of a copy that is there already
WITHOUT = "or data.stage=false"


def refuse_nowhere(stage: bool, node_local: str | None) -> None:
    """What the login node can tell of staging."""
    if stage and not node_local:
        rule = "says where on a node the data are copied to"
        raise Refused("cluster.node_local", "null", rule, f"cluster.node_local='$TMPDIR', {WITHOUT}")


@cache
def place(node_local: str) -> str:
    """`cluster.node_local` on this node: bash reads it, as in a job script. Raises `Refused` if it is no folder."""
    said = subprocess.run(["bash", "-c", f'printf %s "{node_local}"'], capture_output=True, text=True, check=False)
    if not os.path.isdir(said.stdout):
        rule = f"is a folder on {socket.gethostname()}; it leads to {said.stdout!r}"
        raise Refused("cluster.node_local", node_local, rule, f"a folder that jobs have there, {WITHOUT}", alone=True)
    return said.stdout


def copy_of(parts: Parts, node_local: str) -> str:
    """Where the copy of a packed file is on this node. Its folder's name says what is in it, and whose it is."""
    folder = f"data-{os.getuid()}-{parts.checksum[:16]}"
    return os.path.join(place(node_local), folder, os.path.basename(parts.file))


def stage(parts: Parts, node_local: str) -> str:
    """Copy a packed file to this node, if it is not there, and verify the copy. To be called once per node.

    Raises:
        Refused: there is no room, the copy cannot be written, or it is not what was packed.
    """
    copy = copy_of(parts, node_local)
    size = os.path.getsize(parts.file)
    try:
        if _is_there(copy, size):
            with suppress(Refused):  # what is damaged is copied again
                verify(replace(parts, file=copy), "data.stage", LOOKED_AT)
                return copy
        _refuse_without_room(size, node_local)
        sys.stderr.write(f"{socket.gethostname()}: copying {parts.file} ({size / 1e9:.3g} GB) to {copy}\n")
        _copy(parts, copy)
    except OSError as error:
        rule = f"copies {parts.file} to {copy} on {socket.gethostname()}; {error.strerror or error}"
        raise Refused("data.stage", True, rule, f"make room there, {WITHOUT}", alone=True) from None
    return copy


def _is_there(copy: str, size: int) -> bool:
    """A whole copy of ours: on storage that all users share, somebody else may have put a file there."""
    with suppress(FileNotFoundError):
        found = os.lstat(os.path.dirname(copy))
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(0, "the folder there belongs to somebody else")
        return os.path.getsize(copy) == size
    return False


def _refuse_without_room(size: int, node_local: str) -> None:
    free = shutil.disk_usage(place(node_local)).free
    if free < size:
        where = f"{place(node_local)} on {socket.gethostname()}"
        rule = f"needs {size / 1e9:.3g} GB; {where} has {free / 1e9:.3g} GB free"
        raise Refused("data.stage", True, rule, f"another cluster.node_local=, {WITHOUT}", alone=True)


def _copy(parts: Parts, copy: str) -> None:
    """Aside, verified, then renamed: what bears the name is whole."""
    os.makedirs(os.path.dirname(copy), mode=0o700, exist_ok=True)
    aside = f"{copy}.{os.getpid()}.part"
    try:
        shutil.copyfile(parts.file, aside)
        verify(replace(parts, file=aside), "data.stage")
        os.replace(aside, copy)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)
