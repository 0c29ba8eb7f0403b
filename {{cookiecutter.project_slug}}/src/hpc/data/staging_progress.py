"""Data that are being copied to a node are no hang, on any rank of the run: those that wait hear that it goes on."""

from typing import Any

from hpc.data import staging
from hpc.run.watchdog import Watchdog

STORE_KEY = "copying/moves"


class StagingProgress:
    """From now on, till the watch converses of something else, each sign of a copy is progress of all ranks.

    Args:
        step: where the run begins.
    """

    def __init__(self, watch: Watchdog, step: int) -> None:
        self.watch, self.step = watch, step
        self._moves = self._told = self._heard = 0
        staging.on_progress = self.moved
        watch.exchange_with(self.turn)

    def moved(self) -> None:
        """A copy on this node goes on."""
        self._moves += 1
        self._progress()

    def turn(self, store: Any) -> None:
        """Tell the other ranks, and hear of them, about once a second."""
        if self._told != self._moves:
            self._told = self._moves
            store.add(STORE_KEY, 1)
        heard = store.add(STORE_KEY, 0)
        if heard != self._heard:
            self._heard = heard
            self._progress()

    def _progress(self) -> None:
        self.watch.report_progress(self.step, "copying data to a node")
