"""Messages between the watchdogs of one launch, through the store that rank 0 serves."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpc.run.causes import RANK_0_GONE

POLL_SECONDS = 1.0  # between two requests to the store
SILENCE_SECONDS = 60.0  # without an answer, after which rank 0's node counts as lost
TURN_SECONDS = 0.2  # between two looks at who has come to the end


class Peers:
    """The other ranks, as this rank's watchdog knows them.

    It has two connections of its own: on a shared one, whoever waits for an answer keeps the others waiting.
    """

    def __init__(self, store: Any, world_size: int) -> None:
        self._reads, self._writes = store.clone(), store.clone()
        self._world_size = world_size
        self._failure = ""
        self._num_answers = self._num_answers_seen = self._num_unanswered = 0
        self.exchanges: list[Callable[[Any], object]] = []  # each is called with the store, about once a second

    def report_failure(self, rank: int, *, host: str, error: str) -> None:
        """Let the others know that this rank has failed; only the first report counts."""
        kind, _, message = error.partition(": ")
        report = {"rank": rank, "host": host, "time": time.time(), "type": kind, "message": message}
        with suppress(RuntimeError):
            self._writes.compare_set("watch/failed", "", json.dumps(report))  # sets it only if nobody has

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks have come to this point, including late ones, for at most so many seconds."""
        limit = time.monotonic() + seconds
        with suppress(RuntimeError):
            self._writes.add("watch/left", 1)
            while time.monotonic() < limit and self._writes.add("watch/left", 0) < self._world_size:
                time.sleep(TURN_SECONDS)

    def listen(self, over: threading.Event) -> None:
        """Poll the store until another rank has failed, or rank 0 is gone, or the event is set."""
        try:
            while not over.wait(POLL_SECONDS):
                has_failed = self._reads.check(["watch/failed"])
                self._num_answers += 1
                for exchange in [*self.exchanges]:
                    exchange(self._reads)
                if has_failed:
                    report = json.loads(self._reads.get("watch/failed"))
                    error = f"{report['type']}: {report['message']}"
                    # Nobody knows yet which rank a hang comes from, so no rank is named.
                    is_hang = error.startswith("Hang")
                    self._failure = error if is_hang else f"rank {report['rank']} on {report['host']}: {error}"
                    return
        except RuntimeError as error:
            self._failure = f"{RANK_0_GONE}: {str(error).splitlines()[0]}"

    def poll_failure(self) -> str:
        """Return the failure of another rank, or "". To be called every `POLL_SECONDS`.

        The calls are counted instead of the time: if one thread keeps the interpreter's lock, no thread can receive an
        answer.
        """
        self._num_unanswered = self._num_unanswered + 1 if self._num_answers == self._num_answers_seen else 0
        self._num_answers_seen = self._num_answers
        silence = self._num_unanswered * POLL_SECONDS
        if self._failure or silence <= SILENCE_SECONDS:
            return self._failure
        return f"{RANK_0_GONE}: its store has been silent for {silence:.0f} s"
