"""What all ranks must do together, or it is said that one of them does something else."""

import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpc.run import stacks

POLL_SECONDS = 0.05
STORE_SECONDS = 0.5  # between two questions to the store, which all ranks ask
MAX_TURNS = 5  # exchanges, one a second, for which a rank may communicate for another purpose while one waits
QUICK_SECONDS = 1.0  # for which nothing is asked
SPIN_SECONDS = 0.002
MAX_LETTERS = 200


class Absent(Exception):
    """A rank does something else; the message says what."""


class Meeting:
    """The part of one rank. The main thread calls `compare`, the watchdog's thread `exchange`.

    Args:
        store: that all ranks reach.

    Attributes:
        num_steps: that this rank has begun, of training and evaluation.
    """

    def __init__(self, store: Any) -> None:
        self._store = store.clone()  # whoever waits on a connection keeps others waiting
        self.num_steps = self._num_meetings = self._num_turns = 0

    def compare(self, what: str, group: Any, *, is_before_backward: bool = False, is_patient: bool = False) -> None:
        """Wait until all ranks are about to do the same.

        Args:
            what: a verb and its object.
            group: of all ranks, on the host.
            is_before_backward: a rank in the backward of the same step has then gone on; else it may be slow.
            is_patient: a rank has only gone on when it has begun a later step.

        Raises:
            Absent: some of them are about to do another thing.
        """
        self._num_meetings += 1
        checksum = zlib.crc32(f"{self.num_steps} {what}".encode())
        of_ranks = torch.tensor([checksum, -checksum])
        work: Any = dist.all_reduce(of_ranks, dist.ReduceOp.MAX, group=group, async_op=True)
        asked = f"{self.num_steps} {int(is_before_backward)} {int(is_patient)}"
        self._wait_for(work.is_completed, asked)
        work.wait()
        if of_ranks[0] != -of_ranks[1]:
            others: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(others, what, group=group)
            another = next((other for other in others if other != what), "do the same, in another step")
            raise Absent(f"is about to {another[:MAX_LETTERS]}")

    def exchange(self, store: Any) -> None:
        """Answer ranks that wait for this one, if it has gone on without them. Called about once a second."""
        key = f"meeting/{self._num_meetings + 1}"
        if not store.check([f"{key}/asked"]):
            self._num_turns = 0
            return
        their_steps, is_before_backward, is_patient = map(int, store.get(f"{key}/asked").decode().split())
        thread = threading.main_thread().ident or 0
        # A rank that is behind may be slow.
        is_past = is_before_backward and self.num_steps == their_steps and stacks.is_in_backward(thread)
        is_past = is_past or (stacks.is_in_collective(thread) and not is_patient)
        self._num_turns = self._num_turns + 1 if is_past else 0
        if self.num_steps > their_steps or self._num_turns > MAX_TURNS:
            store.set(f"{key}/elsewhere", stacks.describe_main_thread())

    def _wait_for(self, is_over: Callable[[], bool], asked: str) -> None:
        """Wait until a communication is over, which it is in less than a second if all ranks come. Raises `Absent`."""
        begin, key, next_poll = time.monotonic(), f"meeting/{self._num_meetings}", QUICK_SECONDS
        while not is_over():
            waited = time.monotonic() - begin
            time.sleep(0 if waited < SPIN_SECONDS else SPIN_SECONDS if waited < QUICK_SECONDS else POLL_SECONDS)
            if waited < next_poll:
                continue
            if next_poll == QUICK_SECONDS:
                self._store.set(f"{key}/asked", asked)
            if self._store.check([f"{key}/elsewhere"]):
                raise Absent(self._store.get(f"{key}/elsewhere").decode())
            next_poll = waited + STORE_SECONDS
