"""Packed files on a node's own storage: copied there once per node, before training. No torch here."""

import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError
from hpc.packed.packed_file import FileParts, verify_checksums
from hpc.system import private_folder
from hpc.system.files import complete_file

if TYPE_CHECKING:
    from hpc.run.watchdog import Watchdog

MAX_VERIFIED_PARTS = 8  # of a copy that exists already
OR_NO_STAGING = "or data.stage=false"
BLOCK_BYTES = 1 << 20  # that are copied at a time
POLL_SECONDS = 0.5  # between two looks at a copy that another process makes
STORE_KEY = "copying/moves"
on_progress: Callable[[], object] | None = None  # called whenever a copy has grown, whoever makes it


def require_node_local_key(stage: bool, node_local: str | None) -> None:
    """Raise `ConfigError` if data are to be staged and the config names no folder on the node. Needs no node."""
    if stage and not node_local:
        rule = "must name the folder on a node to which data are copied"
        raise ConfigError("cluster.node_local", "null", rule, f"cluster.node_local='$TMPDIR', {OR_NO_STAGING}")


@cache
def node_local_folder(node_local: str) -> str:
    """Return the folder that `cluster.node_local` names on this node, with environment variables replaced.

    Raises:
        ConfigError: it is not a folder here.
    """
    folder = os.path.expandvars(node_local)
    if not os.path.isdir(folder):
        rule = f"must be a folder on {socket.gethostname()}, where it is expanded to {folder!r}"
        fix = f"a folder that jobs have there, with $NAME or ${{NAME}} for variables, {OR_NO_STAGING}"
        raise ConfigError("cluster.node_local", node_local, rule, fix, only_this_rank=True)
    return folder


def staged_path(parts: FileParts, node_local: str) -> str:
    """Return the path of a packed file's copy on this node, in a folder named after the user and the checksum."""
    folder = f"data-{os.getuid()}-{parts.checksum[:16]}"
    return os.path.join(node_local_folder(node_local), folder, os.path.basename(parts.file))


def stage_file(parts: FileParts, node_local: str) -> str:
    """Copy a packed file to this node, unless it is there, and verify the copy; return its path. Call once per node.

    Runs that share the node share the copy: one of them makes it, the others wait.

    Raises:
        ConfigError: there is no room, the copy cannot be written, or it differs from what was packed.
    """
    copy = staged_path(parts, node_local)
    size = os.path.getsize(parts.file)
    try:
        if not _is_whole(parts, copy, size):
            folder = private_folder.make(Path(copy).parent)
            with _lock_folder(folder):
                if not _is_whole(parts, copy, size):
                    _reject_without_room(size, node_local)
                    sys.stderr.write(f"{socket.gethostname()}: copying {parts.file} ({size / 1e9:.3g} GB) to {copy}\n")
                    _copy(parts, copy)
    except OSError as error:
        rule = f"Staging cannot copy {parts.file} to {copy} on {socket.gethostname()}: {error.strerror or error}"
        raise ConfigError("data.stage", True, rule, f"make room there, {OR_NO_STAGING}", only_this_rank=True) from None
    return copy


def _is_whole(parts: FileParts, copy: str, size: int) -> bool:
    """Return whether a whole copy exists. Raise `PermissionError` if others can write into its folder."""
    with suppress(FileNotFoundError, ConfigError):  # a damaged copy is made again
        private_folder.check(Path(copy).parent)
        if os.path.getsize(copy) == size:
            verify_checksums(replace(parts, file=copy), config_key="data.stage", max_parts=MAX_VERIFIED_PARTS)
            return True
    return False


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes of this user on this node, and remove what killed ones have left.

    Wait for a process that makes a copy here: whatever it adds is progress of this one, too.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # storage without locks: each process makes a copy, and the last one stays
            before = _unfinished_copies(folder)
            while not _is_lock_taken(descriptor):
                time.sleep(POLL_SECONDS)
                if (now := _unfinished_copies(folder)) != before:
                    _report_progress()
                before = now
            for unfinished in folder.glob("*.part"):
                unfinished.unlink()
        yield
    finally:
        os.close(descriptor)


def _is_lock_taken(descriptor: int) -> bool:
    """Take the lock, and return whether nobody else has it. Raise `OSError` where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _report_progress() -> None:
    if on_progress:
        on_progress()


def _unfinished_copies(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of modification of the copies that are being made, by name."""
    copies = {}
    for path in folder.glob("*.part"):
        with suppress(FileNotFoundError):
            copies[path.name] = path.stat().st_size, path.stat().st_mtime_ns
    return copies


def _reject_without_room(size: int, node_local: str) -> None:
    free = shutil.disk_usage(node_local_folder(node_local)).free
    if free < size:
        folder = f"{node_local_folder(node_local)} on {socket.gethostname()}"
        rule = f"Staging needs {size / 1e9:.3g} GB, but {folder} has {free / 1e9:.3g} GB free"
        fix = f"another cluster.node_local=, {OR_NO_STAGING}"
        raise ConfigError("data.stage", True, rule, fix, only_this_rank=True)


def _copy(parts: FileParts, copy: str) -> None:
    """Copy under another name, verify, then rename: a file of the right name is always whole."""
    unfinished = f"{copy}.{socket.gethostname()}-{os.getpid()}.part"

    def on_part() -> None:
        os.utime(unfinished)  # which other processes see
        _report_progress()

    with complete_file(Path(copy), Path(unfinished)):
        copy_file(parts.file, unfinished)
        verify_checksums(replace(parts, file=unfinished), config_key="data.stage", on_part=on_part)


def copy_file(source: str, target: str) -> None:
    """Copy a file, and report each block as progress. Raise `OSError`."""
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        while block := memoryview(reader.read(BLOCK_BYTES)):
            while block:
                block = block[writer.write(block) :]
            _report_progress()


class StagingProgress:
    """Progress of staging for the watchdogs of all ranks: ranks that wait for a copy do not hang.

    It reports each sign of a copy as progress of all ranks, to the watchdog of this rank.
    """

    def __init__(self, watch: "Watchdog") -> None:
        self.watch = watch
        self._num_signs = 0  # of copies on this node
        self._num_sent = 0  # value of `_num_signs` when the other ranks were last told
        self._num_received = 0  # value of the counter in the store when it was last read
        global on_progress
        on_progress = self.on_copy_progress
        watch.add_store_exchange(self.exchange)

    def on_copy_progress(self) -> None:
        """Report that a copy on this node has grown."""
        self._num_signs += 1
        self._report()

    def exchange(self, store: Any) -> None:
        """Exchange signs with the other ranks; the watchdog calls this about once a second."""
        if self._num_sent != self._num_signs:
            self._num_sent = self._num_signs
            store.add(STORE_KEY, 1)
        counter = store.add(STORE_KEY, 0)
        if counter != self._num_received:
            self._num_received = counter
            self._report()

    def _report(self) -> None:
        self.watch.report_activity("copying data to a node")
