"""What all ranks must do together, or it is said that one of them does something else."""

import threading
import time
from collections.abc import Callable
from typing import Any

from hpc.run import stacks

POLL_SECONDS = 0.05
MAX_TURNS = 5  # exchanges, one a second, for which a rank may communicate for another purpose while one waits
QUICK_SECONDS = 1.0  # for which nothing is asked
SPIN_SECONDS = 0.002


class Absent(Exception):
    """A rank does something else; the message says what."""


class Meeting:
    """The part of one rank. The main thread calls the other methods, the watchdog's thread `exchange`.

    Args:
        purpose: a name, the same on all ranks.
        store: that all ranks reach.

    Attributes:
        num_steps: that this rank has begun, of training and evaluation.
    """

    def __init__(self, purpose: str, store: Any) -> None:
        self._purpose, self._store = purpose, store.clone()  # whoever waits on a connection keeps others waiting
        self.num_steps = self._num_meetings = self._num_turns = 0

    def wait_for_counted(self, num_ranks: int) -> None:
        """Wait until all ranks have come, counted in the store. Raises `Absent`."""
        self._num_meetings += 1
        key = f"{self._key}/ranks"
        self._store.add(key, 1)
        self._ask(lambda: self._store.add(key, 0) == num_ranks)

    def wait_for(self, is_over: Callable[[], bool], *, is_before_backward: bool) -> None:
        """Wait until a communication is over, which it is in less than a second if all ranks come. Raises `Absent`.

        Args:
            is_before_backward: a rank in the backward of the same step has then gone on; else it may be slow.
        """
        self._num_meetings += 1
        begin = time.monotonic()
        while not is_over():
            waited = time.monotonic() - begin
            if waited > QUICK_SECONDS:
                return self._ask(is_over, is_before_backward=is_before_backward)
            time.sleep(0 if waited < SPIN_SECONDS else SPIN_SECONDS)
        return None

    def exchange(self, store: Any) -> None:
        """Answer ranks that wait for this one, if it has gone on without them. Called about once a second."""
        key = f"{self._purpose}/{self._num_meetings + 1}"
        if not store.check([f"{key}/steps"]):
            self._num_turns = 0
            return
        their_steps, is_before_backward = map(int, store.get(f"{key}/steps").decode().split())
        thread = threading.main_thread().ident or 0
        # A rank that is behind may be slow.
        is_past = is_before_backward and self.num_steps == their_steps and stacks.is_in_backward(thread)
        self._num_turns = self._num_turns + 1 if is_past or stacks.is_in_collective(thread) else 0
        if self.num_steps > their_steps or self._num_turns > MAX_TURNS:
            store.set(f"{key}/elsewhere", stacks.describe_main_thread())

    def _ask(self, is_over: Callable[[], bool], *, is_before_backward: bool = True) -> None:
        self._store.set(f"{self._key}/steps", f"{self.num_steps} {int(is_before_backward)}")
        while not is_over():
            if self._store.check([f"{self._key}/elsewhere"]):
                raise Absent(self._store.get(f"{self._key}/elsewhere").decode())
            time.sleep(POLL_SECONDS)

    @property
    def _key(self) -> str:
        return f"{self._purpose}/{self._num_meetings}"
