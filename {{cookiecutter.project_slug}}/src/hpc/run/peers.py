"""What the watches of one launch tell each other through the store that rank 0 serves."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LOOK = 1.0  # seconds between two questions to the store
SILENCE = 60.0  # seconds without an answer, after which rank 0's node counts as lost


class Peers:
    """Two connections of the watch's own: on a shared one, whoever waits keeps the others waiting."""

    def __init__(self, store: Any, world_size: int) -> None:
        self._hears, self._says = store.clone(), store.clone()
        self._world_size = world_size
        self._heard = ""
        self._answers = self._seen = self._unanswered = 0
        self.turn: Callable[[Any], object] | None = None  # what else there is to say and to hear, each time

    def tell(self, rank: int, host: str, said: str) -> None:
        """This rank has failed; the first to say so is heard."""
        kind, _, message = said.partition(": ")
        news = {"rank": rank, "host": host, "time": time.time(), "type": kind, "message": message}
        with suppress(RuntimeError):
            if not self._says.check(["watch/failed"]):
                self._says.set("watch/failed", json.dumps(news))

    def leave(self, seconds: float) -> None:
        """Hear no more; wait so long for all ranks to come to this point, too, those that are late included."""
        limit = time.monotonic() + seconds
        with suppress(RuntimeError):
            self._says.add("watch/left", 1)
            while time.monotonic() < limit and self._says.add("watch/left", 0) < self._world_size:
                time.sleep(0.2)

    def hear(self, over: threading.Event) -> None:
        """Ask till another rank has failed, or the store with rank 0."""
        try:
            while not over.wait(LOOK):
                failed = self._hears.check(["watch/failed"])
                self._answers += 1
                if self.turn:
                    self.turn(self._hears)
                if failed:
                    told = json.loads(self._hears.get("watch/failed"))
                    said = f"{told['type']}: {told['message']}"
                    # Of a hang nobody knows yet whose it is: it is told as it was.
                    self._heard = said if said.startswith("Hang") else f"rank {told['rank']} on {told['host']}: {said}"
                    return
        except RuntimeError as error:
            self._heard = f"rank 0 is gone: {str(error).splitlines()[0]}"

    def news(self) -> str:
        """That another rank has failed, or nothing. To be called every LOOK seconds.

        The calls are counted, not the time: where one thread keeps the interpreter's lock, nobody hears an answer.
        """
        self._unanswered = self._unanswered + 1 if self._answers == self._seen else 0
        self._seen = self._answers
        silence = self._unanswered * LOOK
        return self._heard or (f"rank 0 is gone: its store is silent for {silence:.0f} s" if silence > SILENCE else "")
