"""Packing in parts: done in processes, noted in a journal once they are on the disk, so that a second call goes on.

Beside `out` lie, until it is whole, `.out.part`, what is there of it, and `.out.journal`: a line that says what is
packed and how, then one for each part that is done. No torch here, and no threads while processes are forked.
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

Work = Callable[[int], Any]


def unfinished_paths(out: str) -> tuple[str, str]:
    """Where the unfinished file and its journal are. Hidden: what reads a folder does not take them for data."""
    folder, name = os.path.split(out)
    return os.path.join(folder, f".{name}.part"), os.path.join(folder, f".{name}.journal")


@contextmanager
def open_journal(
    out: str, plan: str, *, files_of_part: Callable[[int], Iterable[str]]
) -> Iterator[tuple[dict[int, Any], Callable[[int, str, Any], None]]]:
    """(what was noted of the parts that are done, a function that notes one: its number, state and result).

    Args:
        files_of_part: returns the files of a part. A part whose files have changed is packed again, and so are those
            after it.

    Raises:
        ConfigError: another process packs into this file, or an interrupted one had other files or settings.
    """
    part, path = unfinished_paths(out)
    with open(path, "a+", encoding="utf-8") as stream:
        _lock(stream, out)
        if os.path.lexists(out):  # since this process has looked
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise ConfigError("out", out, "has just been packed by another process", f"use it, or: rm '{out}'")
        stream.seek(0)
        lines = stream.read().split("\n")[:-1]  # after the last newline: what a crash cut short
        if lines and json.loads(lines[0]) != plan:
            rule = "was begun with other files or settings, and not finished"
            raise ConfigError("out", out, rule, f"the same command as then, or: rm '{part}' '{path}'")
        if not os.path.exists(part):
            lines = []  # what they tell of is gone
        done = {number: (state, result) for number, state, result in map(json.loads, lines[1:])}
        current = dict(takewhile(lambda one: one[1][0] == files_state(files_of_part(one[0])), done.items()))
        stream.truncate(len("".join(f"{line}\n" for line in lines[: 1 + len(current)]).encode()))

        def note(*entry: Any) -> None:
            stream.write(json.dumps(entry) + "\n")
            stream.flush()

        if not lines:
            with suppress(FileNotFoundError):
                os.unlink(part)
            stream.write(json.dumps(plan) + "\n")
        yield {number: result for number, (_, result) in current.items()}, note


def files_state(files: Iterable[str]) -> str:
    """By what it shows that files have changed: their sizes and the times of their last change."""
    with ThreadPoolExecutor(8) as pool:  # a parallel file system takes its time for each
        return hashlib.sha256(repr(list(pool.map(_size_and_time, files))).encode()).hexdigest()[:16]


def _size_and_time(file: str) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None  # who reads it will name it
    return found.st_size, found.st_mtime_ns


def work_with_state(work: Work, files: Callable[[int], Iterable[str]], number: int) -> tuple[str, Any]:
    """The state of a part's files, and then what `work` makes of them."""
    return files_state(files(number)), work(number)


def publish(out: str) -> None:
    """What was unfinished gets its name, on the disk first. Raises `OSError`."""
    part, path = unfinished_paths(out)
    with open(part, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(part, out)
    os.unlink(path)


def map_in_order(work: Work, numbers: Iterable[int], *, num_processes: int) -> Iterator[Any]:
    """work(number) for each of them, by so many processes; the results in order. What it raises is raised here."""
    waiting: deque[Future[Any]] = deque()
    context = multiprocessing.get_context("fork")  # `work` may hold long lists: they are shared, not sent
    with ProcessPoolExecutor(num_processes, context, _begin, (work,)) as pool:
        try:
            for number in numbers:
                waiting.append(pool.submit(_do, number))
                if len(waiting) > 2 * num_processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            rule = "a process that packed was killed; where memory is short, the kernel does that"
            fix = "the same command again: it goes on; on fewer cores: taskset -c 0-3 python ..."
            raise ConfigError("out", None, rule, fix) from None
        finally:
            for future in waiting:
                future.cancel()


def write_at(descriptor: int, data: memoryview, *, offset: int) -> None:
    """Write all of it at this place, to the disk. Raises `OSError`, also when the disk is full."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
    os.fdatasync(descriptor)


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _lock(stream: IO[str], out: str) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rule = "is being packed by another process"
        raise ConfigError("out", out, rule, "wait for it, or another out=") from None
    except OSError:
        return  # a file system without locks


_work: Work | None = None


def _begin(work: Work) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, too
    placement.die_with_parent()


def _do(number: int) -> Any:
    assert _work
    return _work(number)
