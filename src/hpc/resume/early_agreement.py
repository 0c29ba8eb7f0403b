"""Agree earlier than planned: ranks whose steps became slow must not keep the interval of the fast ones.

The main threads exchange nothing at moments without an agreement, and one rank may be several moments ahead of another.
A step here is such a moment (agreement.py). So the watchdogs' threads agree among themselves, through the store, on the
step of the next agreement. Rank 0 proposes a
step; a rank that has not reached it yet promises to wait there; when all have promised, rank 0 confirms it. If one is
further already, rank 0 proposes a later step.
"""

import threading
from collections.abc import Callable
from typing import Any

PATIENCE_TURNS = 2  # exchanges, one a second, for which a rank waits for the planned agreement
CONFIRMED = b"confirmed"


class EarlyAgreement:
    """The part of one rank. The main thread calls `wait_if_promised` and `conclude`, the watchdog's thread `exchange`.

    Args:
        is_wanted: return whether this rank wants an agreement as soon as possible; both threads call it.
        rank, num_ranks: of the ranks that agree.
    """

    def __init__(self, is_wanted: Callable[[], bool], *, rank: int, num_ranks: int) -> None:
        self.is_wanted, self.rank, self.num_ranks = is_wanted, rank, num_ranks
        self._changed = threading.Condition()
        self._num_agreements = 0  # the same on every rank
        self._reached_step = -1  # the last step that this rank has reached
        self._promised_step: int | None = None
        self._is_confirmed = False
        self._reset_exchange()

    # Called by the main thread

    def wait_if_promised(self, step: int) -> bool:
        """Return whether all ranks agree at this step, which this rank has reached. Waits if it has promised to."""
        if self.num_ranks == 1:
            return self.is_wanted()
        self._reached_step = step
        if self._promised_step is None:  # no lock at every step: `_receive` first sets the promise, then reads the step
            return False
        with self._changed:
            while (is_agreed := self.reach_step(step)) is None:
                self._changed.wait()
        return is_agreed

    def reach_step(self, step: int) -> bool | None:
        """Record that this rank has reached a step. Return as `wait_if_promised` does, or None where it would wait."""
        self._reached_step = step
        if self._promised_step is None or step < self._promised_step:
            return False
        return True if self._is_confirmed else None

    def conclude(self, step: int) -> None:
        """Record that all ranks have agreed at this step; earlier promises are void."""
        with self._changed:
            self._num_agreements, self._reached_step = self._num_agreements + 1, step
            self._promised_step, self._is_confirmed = None, False

    # Called by the watchdog's thread

    def exchange(self, store: Any) -> None:
        """Send and receive messages, about once a second. Waits for nobody. Raises what the store raises."""
        if self.num_ranks == 1 or not self._num_agreements:  # the first agreement is at the first step
            return
        if self._exchanged_agreement != self._num_agreements:
            self._reset_exchange()
        self._waited_turns = self._waited_turns + 1 if self.is_wanted() else 0
        if self._waited_turns > PATIENCE_TURNS and not self._has_called:
            self._has_called = True
            store.set(self._key("called"), b"")
        if self.rank == 0:
            self._propose(store)
        if store.check([self._key(self._num_received)]):
            self._receive(store, store.get(self._key(self._num_received)))

    def _reset_exchange(self) -> None:
        """Forget the messages about the last agreement."""
        self._exchanged_agreement = self._num_agreements
        self._waited_turns = self._num_received = self._num_sent = 0
        self._has_called = False

    def _key(self, topic: object) -> str:
        return f"early/{self._exchanged_agreement}/{topic}"

    def _receive(self, store: Any, message: bytes) -> None:
        """Answer a proposal of rank 0, or take note that all ranks have promised."""
        number, self._num_received, reached_step = self._num_received, self._num_received + 1, -1
        with self._changed:
            if self._exchanged_agreement != self._num_agreements:
                return  # all ranks have agreed meanwhile, and their requests were heard
            if message == CONFIRMED:
                self._is_confirmed = True
            else:
                earlier_promise, self._promised_step = self._promised_step, int(message)
                reached_step = self._reached_step  # read after the promise is set, which a later step then sees
                if reached_step >= int(message):
                    self._promised_step = earlier_promise
            self._changed.notify()
        if message != CONFIRMED:
            if reached_step >= int(message):
                store.append(self._key(f"{number}/passed"), f"{reached_step} ")
            store.add(self._key(f"{number}/answers"), 1)

    def _propose(self, store: Any) -> None:
        """Send the next message to all ranks, including rank 0, once all have answered the last one."""
        if self._num_sent == 0:
            if store.check([self._key("called")]):
                self._send(store, str(self._reached_step + 1).encode())
            return
        last = self._num_sent - 1
        num_answers = store.add(self._key(f"{last}/answers"), 0) if self._num_received >= self._num_sent else 0
        if num_answers < self.num_ranks:
            return
        if store.check([self._key(f"{last}/passed")]):  # further each time: a rank may not wait for the others at all
            reached_steps = map(int, store.get(self._key(f"{last}/passed")).split())
            self._send(store, str(max(*reached_steps, self._reached_step) + 4**self._num_sent).encode())
        else:
            self._send(store, CONFIRMED)

    def _send(self, store: Any, message: bytes) -> None:
        store.set(self._key(self._num_sent), message)
        self._num_sent += 1
