"""Write a packed file from parts that several processes make: whole, or not at all. No torch here.

Until `out` is whole, it lies beside itself as the hidden file `.out.part`, which this process has locked. No threads
are started before processes are forked.
"""

import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hpc.config.errors import ConfigError
from hpc.launch import placement
from hpc.packed.packed_file import HEADER_BYTES, notes_checksum, npy_header
from hpc.system import process
from hpc.system.files import write_durably

MakePart = Callable[[int], bytes | list[ConfigError]]


def write_packed_file(
    out: str,
    make_part: MakePart,
    num_parts: int,
    *,
    title: str,
    dtype: str,
    item_shape: Sequence[int] = (),
    num_bytes: int = 0,
    describe: Callable[[int], dict[str, Any]],
    beside: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write the array `out` and its notes; return the notes.

    Args:
        make_part: returns the bytes of a part of the array, or an error for each file that it cannot read.
        title: of the progress bar.
        item_shape: of an image; () for tokens.
        num_bytes: of the array, if that is known, for which the disk must have room.
        describe: returns what the notes say beside dtype, parts and checksum, given the number of items.
        beside: texts of further files, by what their names have after `out`.

    Raises:
        ConfigError: another process packs this file, the disk has no room, or files cannot be read.
        OSError: the file cannot be written.
    """
    import numpy as np

    item_bytes = np.dtype(dtype).itemsize * int(np.prod(item_shape, dtype=int))
    parts: list[list[int]] = []
    unreadable: list[ConfigError] = []
    with _open_unfinished(out) as stream:
        _reject_full_disk(out, num_bytes)
        stream.seek(HEADER_BYTES)
        for part in map_with_progress(make_part, num_parts, title=title):
            if isinstance(part, list):
                unreadable += part
            elif not unreadable:  # else only the other unreadable files are looked for
                stream.write(part)
                parts.append([len(part) // item_bytes, zlib.crc32(part)])
        reject_unreadable(unreadable)
        num_items = sum(num for num, _ in parts)
        notes = {"dtype": dtype, "parts": parts, **describe(num_items)}
        notes["checksum"] = notes_checksum(notes)
        stream.seek(0)
        stream.write(npy_header(dtype, (num_items, *item_shape)))
        stream.flush()
        os.fsync(stream.fileno())
        if not _has_path(stream, unfinished_path(out)):  # another process has begun it, which only locks prevent
            raise _packed_by_another(out)
        for ending, text in {**(beside or {}), ".json": json.dumps(notes)}.items():
            write_durably(Path(out + ending), lambda stream, text=text: stream.write(text.encode()))
        os.replace(unfinished_path(out), out)
    return notes


def unfinished_path(out: str) -> str:
    """Return the path of the unfinished file: hidden, so that nothing takes it for data."""
    folder, name = os.path.split(out)
    return os.path.join(folder, f".{name}.part")


def reject_unreadable(unreadable: Sequence[ConfigError]) -> None:
    """Raise the first of these errors, after all others were printed: they can be repaired together."""
    for error in unreadable[1:]:
        print(str(error).splitlines()[0], file=sys.stderr)
    if unreadable:
        first = unreadable[0]
        more = f" ({len(unreadable) - 1} more are named above)" if len(unreadable) > 1 else ""
        raise ConfigError(first.key, first.value, first.rule + more, first.fix)


def map_with_progress(work: Callable[[int], Any], num_parts: int, *, title: str) -> Iterator[Any]:
    """Yield work(number) for each part's number, in order, from all cores; show a progress bar."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread, as processes are forked
    if num_parts:
        num_processes = min(process.num_cores(), num_parts)
        results = map_in_order(work, num_parts, num_processes=num_processes)
        yield from tqdm(results, f"{title} ({num_processes} processes)", num_parts, unit="part")


def map_in_order(work: Callable[[int], Any], num_parts: int, *, num_processes: int) -> Iterator[Any]:
    """Yield work(number) for each number, in order, computed by several processes. Raise what `work` raises."""
    futures: deque[Future[Any]] = deque()
    context = multiprocessing.get_context("fork")  # `work` may hold long lists: they are shared, not sent
    with ProcessPoolExecutor(num_processes, context, _start_process, (work,)) as pool:
        try:
            for number in range(num_parts):
                futures.append(pool.submit(_do, number))
                if len(futures) > 2 * num_processes:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        except BrokenProcessPool:
            rule = "A process that packed was killed, which the kernel does when memory is short"
            fix = "the same command on fewer cores: taskset -c 0-3 python ..."
            raise ConfigError("out", None, rule, fix) from None
        finally:
            for future in futures:
                future.cancel()


@contextmanager
def _open_unfinished(out: str) -> Iterator[IO[bytes]]:
    """Yield the unfinished file, empty and locked; remove it in the end, unless it has been given its name.

    Where the file system has no locks, each process writes a file of its own, and the last to begin may publish it.
    """
    path = unfinished_path(out)

    def create(flags: int = 0) -> IO[bytes]:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666), "r+b")

    stream = create()
    try:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _packed_by_another(out) from None
        except OSError:
            os.unlink(path)
            stream.close()
            stream = create(os.O_EXCL)
        try:
            if os.path.lexists(out):  # made since this process checked
                rule = "Another process has just packed this file"
                raise ConfigError("out", out, rule, f"use it, or: rm '{out}'")
            if not _has_path(stream, path):  # removed since this process opened it
                raise _packed_by_another(out)
            stream.truncate()
            yield stream
        finally:
            if _has_path(stream, path):
                os.unlink(path)
    finally:
        with suppress(OSError):  # what cannot be written was told
            stream.close()


def _has_path(stream: IO[bytes], path: str) -> bool:
    """Return whether this open file is still the one of that path."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _packed_by_another(out: str) -> ConfigError:
    rule = "cannot be packed now, as another process is packing it"
    return ConfigError("out", out, rule, "wait for it, or another out=")


def _reject_full_disk(out: str, num_bytes: int) -> None:
    """Raise `ConfigError` if the disk lacks room for so many bytes. Quotas show only when something is written."""
    free = shutil.disk_usage(os.path.dirname(out)).free
    if num_bytes > free:
        rule = f"The file needs {num_bytes / 1e9:.3g} GB, but the disk has {free / 1e9:.3g} GB free"
        raise ConfigError("out", out, rule, "make room there, or another out=")


_work: Callable[[int], Any] | None = None


def _start_process(work: Callable[[int], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it, too
    placement.die_with_parent()


def _do(number: int) -> Any:
    assert _work
    return _work(number)
