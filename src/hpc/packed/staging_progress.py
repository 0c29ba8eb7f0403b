"""Progress of staging, reported to the watchdogs of all ranks: ranks that wait for a copy do not hang."""

from typing import Any

from hpc.packed import staging
from hpc.run.watchdog import Watchdog

STORE_KEY = "copying/moves"


class StagingProgress:
    """Reports each sign of a copy as progress of all ranks, to the watchdog of this rank."""

    def __init__(self, watch: Watchdog) -> None:
        self.watch = watch
        self._num_signs = 0  # of copies on this node
        self._num_sent = 0  # value of `_num_signs` when the other ranks were last told
        self._num_received = 0  # value of the counter in the store when it was last read
        staging.on_progress = self.on_copy_progress
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
