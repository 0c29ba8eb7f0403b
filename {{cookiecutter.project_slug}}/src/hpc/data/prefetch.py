"""Batches fetched ahead by a thread: for data that are gathered from memory, worker processes are slower than none."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

END = object()


def prefetch(batches: Iterable[Any], num: int) -> Iterator[Any]:
    """The same batches in the same order; up to `num` wait to be taken. What fetching raises is raised here."""
    waiting: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(num)
    over = threading.Event()
    thread = threading.Thread(target=_fetch, args=(batches, waiting, over), daemon=True, name="batches ahead")
    thread.start()
    try:
        while True:
            batch, error = waiting.get()
            if error is not None:
                raise error
            if batch is END:
                return
            yield batch
    finally:  # also when an epoch is left in the middle
        over.set()
        while thread.is_alive():
            _empty(waiting)
            thread.join(0.01)


def _fetch(batches: Iterable[Any], waiting: queue.Queue[Any], over: threading.Event) -> None:
    try:
        for batch in batches:
            waiting.put((batch, None))
            if over.is_set():
                return
        waiting.put((END, None))
    except BaseException as error:
        waiting.put((None, error))


def _empty(waiting: queue.Queue[Any]) -> None:
    try:
        while True:
            waiting.get_nowait()
    except queue.Empty:
        pass
