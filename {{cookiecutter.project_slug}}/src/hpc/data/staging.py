"""Packed files on the node's own storage: copied there once per node, before training. No torch here."""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from hpc.config.errors import ConfigError
from hpc.data.file_parts import FileParts, verify_parts
from hpc.system import private_folder, process

MAX_VERIFIED_PARTS = 8  # parts of a copy that is there already
OR_NO_STAGING = "or data.stage=false"
MIN_PROGRESS_BYTES = 1 << 20  # bytes that a process that verifies has read since the last look
POLL_SECONDS = 1.0  # seconds between two looks at copies that are being made
on_progress: Callable[[], object] | None = None  # called at each look if a copy goes on, made here or by a neighbour


def reject_missing_folder(stage: bool, node_local: str | None) -> None:
    """What the login node can tell of staging."""
    if stage and not node_local:
        rule = "says where on a node the data are copied to"
        raise ConfigError("cluster.node_local", "null", rule, f"cluster.node_local='$TMPDIR', {OR_NO_STAGING}")


@cache
def node_local_folder(node_local: str) -> str:
    """`cluster.node_local` on this node: bash reads it, as in a job script. Raises `ConfigError` if it is no folder."""
    said = subprocess.run(["bash", "-c", f'printf %s "{node_local}"'], capture_output=True, text=True, check=False)
    if not os.path.isdir(said.stdout):
        rule = f"is a folder on {socket.gethostname()}; it leads to {said.stdout!r}"
        raise ConfigError(
            "cluster.node_local",
            node_local,
            rule,
            f"a folder that jobs have there, {OR_NO_STAGING}",
            only_this_rank=True,
        )
    return said.stdout


def copy_path(parts: FileParts, node_local: str) -> str:
    """Where the copy of a packed file is on this node. Its folder's name says what is in it, and whose it is."""
    folder = f"data-{os.getuid()}-{parts.checksum[:16]}"
    return os.path.join(node_local_folder(node_local), folder, os.path.basename(parts.file))


def stage_file(parts: FileParts, node_local: str) -> str:
    """Copy a packed file to this node, if it is not there, and verify the copy. To be called once per node.

    Runs that share the node share the copy: one of them makes it, the others wait for it.

    Raises:
        ConfigError: there is no room, the copy cannot be written, or it is not what was packed.
    """
    copy = copy_path(parts, node_local)
    size = os.path.getsize(parts.file)
    try:
        if not _is_whole(parts, copy, size):
            folder = private_folder.make(Path(copy).parent)
            with _looked_at(folder), _alone(folder):
                if not _is_whole(parts, copy, size):
                    _reject_without_room(size, node_local)
                    sys.stderr.write(f"{socket.gethostname()}: copying {parts.file} ({size / 1e9:.3g} GB) to {copy}\n")
                    _copy(parts, copy)
    except OSError as error:
        rule = f"copies {parts.file} to {copy} on {socket.gethostname()}; {error.strerror or error}"
        raise ConfigError("data.stage", True, rule, f"make room there, {OR_NO_STAGING}", only_this_rank=True) from None
    return copy


def _is_whole(parts: FileParts, copy: str, size: int) -> bool:
    """Is a copy there that holds what was packed? Raises `PermissionError` where its folder is not ours alone."""
    with suppress(FileNotFoundError, ConfigError):  # what is damaged is copied again
        private_folder.check(Path(copy).parent)
        if os.path.getsize(copy) == size:
            verify_parts(replace(parts, file=copy), "data.stage", max_parts=MAX_VERIFIED_PARTS)
            return True
    return False


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this user on this node at a time; what one that was killed has left is cleared away."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # storage without locks: each makes a copy of its own, and the last one's stays
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            for left in folder.glob("*.part"):
                left.unlink()
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _looked_at(folder: Path) -> Iterator[None]:
    """Meanwhile tell `moves` that a copy in this folder goes on, as far as one can see."""
    over = threading.Event()

    def look() -> None:
        before, moved = _parts(folder), process.io_bytes()
        while not over.wait(POLL_SECONDS):
            with suppress(OSError):
                if (
                    process.io_bytes() - moved >= MIN_PROGRESS_BYTES
                ):  # to verify a copy changes nothing that neighbours could see
                    moved = process.io_bytes()
                    for mine in folder.glob(f"*{_aside()}"):
                        os.utime(mine)
                if (now := _parts(folder)) != before and on_progress:
                    on_progress()
                before = now

    thread = threading.Thread(target=look, daemon=True, name="staging: look")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * POLL_SECONDS)


def _parts(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the copies that are being made."""
    found = {}
    for path in folder.glob("*.part"):
        with suppress(FileNotFoundError):
            found[path.name] = path.stat().st_size, path.stat().st_mtime_ns
    return found


def _aside() -> str:
    """How the name of a copy ends that this process makes."""
    return f".{socket.gethostname()}-{os.getpid()}.part"


def _reject_without_room(size: int, node_local: str) -> None:
    free = shutil.disk_usage(node_local_folder(node_local)).free
    if free < size:
        where = f"{node_local_folder(node_local)} on {socket.gethostname()}"
        rule = f"needs {size / 1e9:.3g} GB; {where} has {free / 1e9:.3g} GB free"
        raise ConfigError(
            "data.stage", True, rule, f"another cluster.node_local=, {OR_NO_STAGING}", only_this_rank=True
        )


def _copy(parts: FileParts, copy: str) -> None:
    """Aside, verified, then renamed: what bears the name is whole."""
    aside = f"{copy}{_aside()}"
    try:
        shutil.copyfile(parts.file, aside)
        verify_parts(replace(parts, file=aside), "data.stage")
        os.replace(aside, copy)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(aside)
