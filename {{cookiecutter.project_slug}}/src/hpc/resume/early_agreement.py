"""An agreement earlier than planned: ranks whose steps became slow must not be asked at the pace of the fast ones.

The main threads exchange nothing at steps without an agreement, and one rank may be several steps ahead of another. So
the watch's threads agree among themselves, through the store, about the step of the next agreement: rank 0 proposes a
step; a rank that has not come so far yet promises to wait there; when all have promised, rank 0 confirms it. If one is
further already, rank 0 proposes a later step.
"""

import threading
from collections.abc import Callable
from typing import Any

PATIENCE = 2  # turns (seconds) that a rank waits for the planned agreement before it calls for an earlier one
CONFIRMED = b"confirmed"


class Early:
    """One rank's part. `reach` and `agreed` are the main thread's, `turn` is the watch's.

    Args:
        wanted: does this rank want an agreement as soon as possible? Asked by both threads.
        rank, num_ranks: of those that agree.
        name: of this agreement among those of a run.
    """

    def __init__(self, wanted: Callable[[], bool], rank: int, num_ranks: int, name: str = "early") -> None:
        self.wanted, self.rank, self.num_ranks, self.name = wanted, rank, num_ranks, name
        self._changed = threading.Condition()
        self._agreements = 0  # as many on every rank
        self._passed = -1  # the last step that this rank has reached
        self._promised: int | None = None
        self._confirmed = False
        self._reset()

    # The main thread's

    def reach(self, step: int) -> bool:
        """This rank is at this step. Do all ranks agree here? Waits where it has promised to."""
        if self.num_ranks == 1:
            return self.wanted()
        self._passed = step
        if self._promised is None:  # no lock at every step: this comes after that, and in `_hear` it is the reverse
            return False
        with self._changed:
            while (here := self.look(step)) is None:
                self._changed.wait()
        return here

    def look(self, step: int) -> bool | None:
        """As `reach`, but None where it would wait."""
        self._passed = step
        if self._promised is None or step < self._promised:
            return False
        return True if self._confirmed else None

    def agreed(self, step: int) -> None:
        """All ranks have agreed at this step; what was said before is void."""
        with self._changed:
            self._agreements, self._passed = self._agreements + 1, step
            self._promised, self._confirmed = None, False

    # The watch's

    def turn(self, store: Any) -> None:
        """Say and hear what there is, about once a second. Waits for nobody. Raises what the store does."""
        if self.num_ranks == 1 or not self._agreements:  # the first agreement is at the first step
            return
        if self._agreement != self._agreements:
            self._reset()
        self._waited = self._waited + 1 if self.wanted() else 0
        if self._waited > PATIENCE and not self._called:
            self._called = True
            store.set(self._key("called"), b"")
        if self.rank == 0:
            self._propose(store)
        if store.check([self._key(self._heard)]):
            self._hear(store, store.get(self._key(self._heard)))

    def _reset(self) -> None:
        self._agreement = self._agreements
        self._waited = self._heard = self._said = 0
        self._called = False

    def _key(self, what: object) -> str:
        return f"{self.name}/{self._agreement}/{what}"

    def _hear(self, store: Any, message: bytes) -> None:
        number, self._heard, passed = self._heard, self._heard + 1, -1
        with self._changed:
            if self._agreement != self._agreements:
                return  # there was one meanwhile, in which all said what they want
            if message == CONFIRMED:
                self._confirmed = True
            else:
                before, self._promised = self._promised, int(message)
                passed = self._passed  # only now: a step that is reached meanwhile sees the promise
                if passed >= int(message):
                    self._promised = before
            self._changed.notify()
        if message != CONFIRMED:
            if passed >= int(message):
                store.set(self._key(f"{number}/passed"), str(passed).encode())
            store.add(self._key(f"{number}/answers"), 1)

    def _propose(self, store: Any) -> None:
        """On rank 0: the next message to all, itself included, once all have answered the last one."""
        if self._said == 0:
            if store.check([self._key("called")]):
                self._say(store, str(self._passed + 1).encode())
            return
        last = self._said - 1
        if self._heard < self._said or store.add(self._key(f"{last}/answers"), 0) < self.num_ranks:
            return
        if store.check([self._key(f"{last}/passed")]):  # further each time: a rank may not wait for the others at all
            passed = max(int(store.get(self._key(f"{last}/passed"))), self._passed)
            self._say(store, str(passed + 4**self._said).encode())
        else:
            self._say(store, CONFIRMED)

    def _say(self, store: Any, message: bytes) -> None:
        store.set(self._key(self._said), message)
        self._said += 1
