"""Writes checkpoints beside the training: a thread per rank that talks to the others over a group of its own."""

import errno
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hpc.checkpoint import on_disk
from hpc.run import stacks
from hpc.run.directory import Owner
from hpc.system import process

T = TypeVar("T")
LOOK = 1.0  # seconds between two looks at a write that is waited for
MOVES = 2**20  # bytes that this process must read or write to count as writing; others of its threads do a little
FOR_EVER = timedelta(days=365)  # a rank that is gone is noticed by others than this group


class Unwritten(Exception):
    """A checkpoint was not written, on any rank: the message says why. Those before it are untouched."""


class Writer:
    """One checkpoint at a time. All ranks call each method, in the same order.

    `owner`: on rank 0, who must still have the run directory whenever something in it is to be changed.
    """

    owner: Owner | None = None

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        # Not the group that training uses: its collectives would mix with those of this thread.
        self.group: Any = dist.new_group(backend="gloo", timeout=FOR_EVER) if several else None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._thread_id = 0
        self._held: Callable[[], None] | None = None  # what is written when it is released, or waited for
        self._holds = False
        self.seconds = 0.0  # that the last one took, from its beginning to its being whole

    def begin(self, final: Path) -> Path:
        """The folder to write into. Raises `Unwritten`, also when the one before could not be written."""
        self.wait()
        part = final.with_name(final.name + on_disk.PART)
        self._together(lambda: self._own() and on_disk.aside(final) if self.rank == 0 else None)
        return part

    def finish(
        self,
        part: Path,
        final: Path,
        note: Mapping[str, Any],
        write: Callable[[Path], None],
        afterwards: Callable[[Path], None] | None = None,
    ) -> None:
        """Write in the background, make it durable, give it its name; returns at once.

        Args:
            write: this rank's share, into the folder it is given.
            afterwards: what rank 0 does with the whole checkpoint.
        """

        def run() -> None:
            self._thread_id, began = threading.get_ident(), time.monotonic()
            self._together(lambda: write(part))
            self._together(lambda: on_disk.make_durable(part))
            mine = self._together(lambda: on_disk.sums(part, on_disk.names(part)[self.rank :: self.num_ranks]))
            files = {name: entry for share in mine for name, entry in share.items()}
            self.seconds = time.monotonic() - began
            self._together(lambda: publish(files) if self.rank == 0 else None)

        def publish(files: Mapping[str, tuple[int, int]]) -> None:
            if self._own():
                on_disk.publish(part, final, files, {**note, "seconds": round(self.seconds, 3)})
            if afterwards and self._own():
                afterwards(final)

        self._held = run
        if not self._holds:
            self._begin_held()

    def hold(self) -> None:
        """What is finished from now on is written only when it is released: what precedes it is not over yet."""
        self._holds = True

    def release(self) -> None:
        """Write what was held."""
        self._holds = False
        self._begin_held()

    def drop(self) -> None:
        """Never write what is held."""
        self._held = None

    def _begin_held(self) -> None:
        if self._held:
            self._pending, self._held = self._thread.submit(self._held), None

    def wait(self, meanwhile: Callable[[bool], None] = lambda moves: None) -> None:
        """Until nothing is being written. Raises `Unwritten` if that failed.

        Args:
            meanwhile: called about once a second: is there a sign that this rank's share of the write goes on?
        """
        self._begin_held()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        moved = process.io_bytes()
        while wait([pending], LOOK).not_done:
            now = process.io_bytes()
            moves = now - moved >= MOVES
            moved = now if moves else moved
            # A rank that has done its share waits for the others, which look after themselves.
            meanwhile(moves or stacks.in_collective(self._thread_id))
        pending.result()

    @property
    def busy(self) -> bool:
        """Is something being written?"""
        return self._pending is not None and not self._pending.done()

    def _own(self) -> bool:
        """True, or raises PermissionError: writing took long, and another attempt may have gone on meanwhile."""
        if self.owner and not self.owner.mine():
            raise PermissionError(errno.EPERM, "another attempt has taken over")
        return True

    def _together(self, act: Callable[[], T]) -> list[T]:
        """Do something on every rank; its results in order of ranks. Raises `Unwritten` on all if it failed on one."""
        result: Any = None
        said = ""
        try:
            result = act()
        except CheckpointException as error:  # no Exception: torch makes it of what happened on any rank
            rank, (cause, _) = next(iter(error.failures.items()))
            said = f"{type(cause).__name__}: {cause} (rank {rank})"
        except Exception as error:  # whatever it is: the other ranks wait to hear of it
            said = f"{type(error).__name__}: {error}"
        told: list[Any] = [None] * self.num_ranks
        if self.group is None:
            told = [(said, result)]
        else:
            dist.all_gather_object(told, (said, result), group=self.group)
        if bad := [f"rank {rank}: {said}" for rank, (said, _) in enumerate(told) if said]:
            raise Unwritten(bad[0])
        return [result for _, result in told]
