"""Write checkpoints beside the training: a thread per rank, which talks to the others over a group of its own."""

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
from hpc.run.attempt_log import WritePermission
from hpc.system import process

T = TypeVar("T")
POLL_SECONDS = 1.0  # between two looks at a write that is waited for
# This process must read or write so many bytes between two looks to count as writing: its other threads do a little.
MIN_PROGRESS_BYTES = 2**20
NO_TIMEOUT = timedelta(days=365)  # a rank that is gone is noticed by others than this group


class CheckpointNotWritten(Exception):
    """A checkpoint was not written, on any rank; the message says why. Earlier ones are untouched."""


class CheckpointWriter:
    """Writes one checkpoint at a time. All ranks call each method, in the same order.

    Attributes:
        claim: on rank 0, asked before anything in the run directory is changed.
        seconds: that the last write took, until the checkpoint was whole.
    """

    claim: WritePermission | None = None

    def __init__(self) -> None:
        has_peers = dist.is_available() and dist.is_initialized()
        self.rank, self.num_ranks = (dist.get_rank(), dist.get_world_size()) if has_peers else (0, 1)
        # Not the group that training uses: its collectives would mix with those of this thread.
        self.group: Any = dist.new_group(backend="gloo", timeout=NO_TIMEOUT) if has_peers else None
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._thread_id = 0
        self._deferred_write: Callable[[], None] | None = None  # started on request, or when it is waited for
        self._defers_writes = False
        self.seconds = 0.0

    def prepare_folder(self, final: Path) -> Path:
        """Return the folder to write into. Raises `CheckpointNotWritten`, also if the previous one was not written."""
        self.wait()
        part = final.with_name(final.name + on_disk.PART)

        def make_folder() -> None:
            if self.rank == 0:
                self._require_claim()
                on_disk.make_part_folder(final)

        self._on_all_ranks(make_folder)
        return part

    def start_write(
        self,
        part: Path,
        final: Path,
        *,
        details: Mapping[str, Any],
        write: Callable[[Path], None],
        on_published: Callable[[Path], None] | None = None,
    ) -> None:
        """Start to write in the background, make it durable and give it its name; return at once.

        Args:
            details: entries of the manifest.
            write: writes this rank's share into the folder that it is given.
            on_published: called on rank 0 with the whole checkpoint.
        """

        def run() -> None:
            self._thread_id, start = threading.get_ident(), time.monotonic()
            self._on_all_ranks(lambda: write(part))
            self._on_all_ranks(lambda: on_disk.make_durable(part))
            shares = self._on_all_ranks(checksums_of_share)
            files = {name: entry for share in shares for name, entry in share.items()}
            self.seconds = time.monotonic() - start
            self._on_all_ranks(lambda: publish(files) if self.rank == 0 else None)

        def checksums_of_share() -> dict[str, tuple[int, int]]:
            return on_disk.checksums(part, on_disk.file_names(part)[self.rank :: self.num_ranks])

        def publish(files: Mapping[str, tuple[int, int]]) -> None:
            self._require_claim()
            if on_published is None:  # the researcher's own code saves again under the same name
                on_disk.remove(final)
            on_disk.publish(part, final, files=files, details={**details, "seconds": round(self.seconds, 3)})
            if on_published:
                self._require_claim()
                on_published(final)

        self._deferred_write = run
        if not self._defers_writes:
            self._submit_deferred_write()

    def start(self, function: Callable[[], object]) -> None:
        """Start to call a function on every rank in the background; `wait` waits until all ranks have called it."""
        self.wait()

        def run() -> None:
            self._thread_id = threading.get_ident()
            self._on_all_ranks(function)

        self._pending = self._executor.submit(run)

    def defer_writes(self) -> None:
        """Start no write until `start_deferred_write`: something that must come before it is not over yet."""
        self._defers_writes = True

    def start_deferred_write(self) -> None:
        """Start the write that was deferred, and defer no longer."""
        self._defers_writes = False
        self._submit_deferred_write()

    def discard_deferred_write(self) -> None:
        """Forget the write that was deferred."""
        self._deferred_write = None

    def _submit_deferred_write(self) -> None:
        if self._deferred_write:
            self._pending, self._deferred_write = self._executor.submit(self._deferred_write), None

    def wait(self, meanwhile: Callable[[bool], None] = lambda is_writing: None) -> None:
        """Wait until nothing is being written. Raises `CheckpointNotWritten` if that failed.

        Args:
            meanwhile: called about once a second; True while this rank's write advances or it waits for other ranks.
        """
        self._submit_deferred_write()
        pending, self._pending = self._pending, None
        if pending is None:
            return
        last_bytes = process.io_bytes()
        while wait([pending], POLL_SECONDS).not_done:
            num_bytes = process.io_bytes()
            is_writing = num_bytes - last_bytes >= MIN_PROGRESS_BYTES
            last_bytes = num_bytes if is_writing else last_bytes
            # A rank that has done its share waits for the others, which are watched by themselves.
            meanwhile(is_writing or stacks.is_in_collective(self._thread_id))
        pending.result()

    @property
    def is_busy(self) -> bool:
        """Return True while something is being written."""
        return self._pending is not None and not self._pending.done()

    def _require_claim(self) -> None:
        """Raise PermissionError if another attempt has taken over: writing may have taken long."""
        if self.claim and not self.claim.may_write():
            raise PermissionError(errno.EPERM, "another attempt has taken over")

    def _on_all_ranks(self, function: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return its results in order of ranks.

        Raises:
            CheckpointNotWritten: on all ranks, if it failed on one.
        """
        result: Any = None
        error = ""
        try:
            result = function()
        # Not a subclass of Exception; torch collects the errors of all ranks in it.
        except CheckpointException as exception:
            rank, (cause, _) = next(iter(exception.failures.items()))
            error = f"{type(cause).__name__}: {cause} (rank {rank})"
        except Exception as exception:  # of any kind: the other ranks wait to hear of it
            error = f"{type(exception).__name__}: {exception}"
        outcomes: list[Any] = [None] * self.num_ranks
        if self.group is None:
            outcomes = [(error, result)]
        else:
            dist.all_gather_object(outcomes, (error, result), group=self.group)
        if errors := [f"rank {rank}: {error}" for rank, (error, _) in enumerate(outcomes) if error]:
            raise CheckpointNotWritten(errors[0])
        return [result for _, result in outcomes]
