"""Packing in parts: several processes do them, and a journal notes each that is on the disk, so that it can be resumed.

Until `out` is whole, there are two hidden files beside it. `.out.part` is the unfinished file. `.out.journal` has a
line with the fingerprint of what is packed and how, and a line for each part that is done. No torch here, and no
threads while processes are forked.
"""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import IO, Any

from hpc.config.errors import ConfigError
from hpc.launch import placement

PackFunction = Callable[[int], Any]


def unfinished_paths(out: str) -> tuple[str, str]:
    """Return the paths of the unfinished file and its journal: hidden, so that nothing takes them for data."""
    folder, name = os.path.split(out)
    return os.path.join(folder, f".{name}.part"), os.path.join(folder, f".{name}.journal")


@contextmanager
def open_journal(
    out: str, plan: str, *, files_of_part: Callable[[int], Iterable[str]]
) -> Iterator[tuple[dict[int, Any], Callable[[int, str, Any], None]]]:
    """Yield the noted results of parts that are done, and a function that notes one: its number, state and result.

    Args:
        plan: a fingerprint of what is packed, and how.
        files_of_part: returns the files of a part. A part whose files have changed is packed again, and so are those
            after it.

    Raises:
        ConfigError: another process packs into this file, or an interrupted one had other files or settings.
    """
    unfinished, journal = unfinished_paths(out)
    with open(journal, "a+", encoding="utf-8") as stream:
        _lock(stream, out)
        if os.path.lexists(out):  # made since this process checked
            with suppress(FileNotFoundError):
                os.unlink(journal)
            rule = "Another process has just packed this file"
            raise ConfigError("out", out, rule, f"use it, or: rm '{out}'")
        stream.seek(0)
        lines = stream.read().split("\n")[:-1]  # after the last newline is what a crash cut short
        if len(lines) > 1 and json.loads(lines[0]) != plan:
            rule = "The unfinished file was begun with other files or settings"
            raise ConfigError("out", out, rule, f"the same command as then, or: rm '{unfinished}' '{journal}'")
        if len(lines) == 1 or not os.path.exists(unfinished):  # no part has been packed
            lines = []
        entries = {number: (state, result) for number, state, result in map(json.loads, lines[1:])}
        # Each item is (number, (state, result)).
        done = dict(takewhile(lambda item: item[1][0] == fingerprint_files(files_of_part(item[0])), entries.items()))
        stream.truncate(len("".join(f"{line}\n" for line in lines[: 1 + len(done)]).encode()))

        def note(*entry: Any) -> None:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()

        if not lines:
            with suppress(FileNotFoundError):
                os.unlink(unfinished)
            stream.write(json.dumps(plan) + "\n")
        yield {number: result for number, (_, result) in done.items()}, note


def fingerprint_files(files: Iterable[str]) -> str:
    """Return a checksum of the files' sizes and times of modification, which shows that they have changed."""
    with ThreadPoolExecutor(8) as pool:  # a parallel file system takes its time for each
        return hashlib.sha256(repr(list(pool.map(_size_and_time, files))).encode()).hexdigest()[:16]


def _size_and_time(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None  # reading the file will raise an error that names it
    return status.st_size, status.st_mtime_ns


def run_with_fingerprint(
    work: PackFunction, files_of_part: Callable[[int], Iterable[str]], number: int
) -> tuple[str, Any]:
    """Return the state of a part's files, taken first, and the result of work(number)."""
    return fingerprint_files(files_of_part(number)), work(number)


def publish(out: str) -> None:
    """Flush the unfinished file to the disk, give it its name, and remove the journal. Raise `OSError`."""
    unfinished, journal = unfinished_paths(out)
    with open(unfinished, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(unfinished, out)
    os.unlink(journal)


def map_in_order(work: PackFunction, numbers: Iterable[int], *, num_processes: int) -> Iterator[Any]:
    """Yield work(number) for each number, in order, computed by several processes. Raise what `work` raises."""
    futures: deque[Future[Any]] = deque()
    context = multiprocessing.get_context("fork")  # `work` may hold long lists: they are shared, not sent
    with ProcessPoolExecutor(num_processes, context, _start_process, (work,)) as pool:
        try:
            for number in numbers:
                futures.append(pool.submit(_do, number))
                if len(futures) > 2 * num_processes:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        except BrokenProcessPool:
            rule = "A process that packed was killed, which the kernel does when memory is short"
            fix = "the same command again: it continues; on fewer cores: taskset -c 0-3 python ..."
            raise ConfigError("out", None, rule, fix) from None
        finally:
            for future in futures:
                future.cancel()


def write_at(descriptor: int, data: memoryview, *, offset: int) -> None:
    """Write all data at this offset, to the disk. Raise `OSError`, also when the disk is full."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
    getattr(os, "fdatasync", os.fsync)(descriptor)  # the former is not on every system


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _lock(stream: IO[str], out: str) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rule = "cannot be packed now, as another process is packing it"
        raise ConfigError("out", out, rule, "wait for it, or another out=") from None
    except OSError:
        return  # a file system without locks


_work: PackFunction | None = None


def _start_process(work: PackFunction) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too
    placement.die_with_parent()


def _do(number: int) -> Any:
    assert _work
    return _work(number)
