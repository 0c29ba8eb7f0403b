"""Batches that a thread fetches ahead: for data gathered from memory, worker processes are slower than no workers."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

END = object()


def prefetch(batches: Iterable[Any], num: int) -> Iterator[Any]:
    """Yield the same batches in the same order, while up to `num` more wait in a queue. Raise what fetching raises."""
    fetched: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(num)
    stop = threading.Event()
    thread = threading.Thread(target=_fetch, args=(batches, fetched, stop), daemon=True, name="prefetch batches")
    thread.start()
    try:
        while True:
            batch, error = fetched.get()
            if error is not None:
                raise error
            if batch is END:
                return
            yield batch
    finally:  # also when an epoch is left in the middle
        stop.set()
        while thread.is_alive():
            _empty(fetched)
            thread.join(0.01)


def _fetch(batches: Iterable[Any], fetched: queue.Queue[Any], stop: threading.Event) -> None:
    try:
        for batch in batches:
            fetched.put((batch, None))
            if stop.is_set():
                return
        fetched.put((END, None))
    except BaseException as error:
        fetched.put((None, error))


def _empty(fetched: queue.Queue[Any]) -> None:
    try:
        while True:
            fetched.get_nowait()
    except queue.Empty:
        pass
