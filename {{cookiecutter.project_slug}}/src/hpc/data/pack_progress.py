"""What packing of images and of text have in common: progress, room on the disk, unreadable files, the last lines."""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpc.config import errors
from hpc.config.errors import ConfigError
from hpc.data import packing


def progress(work: Callable[[int], Any], left: Sequence[int], *, title: str) -> Iterator[Any]:
    """Yield what `work` returns for the parts that are left, in order, and show how far it is."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: processes are forked
    if left:
        processes = min(len(os.sched_getaffinity(0)), len(left))
        results = packing.in_order(work, left, processes)
        yield from tqdm(results, f"{title} ({processes} processes)", len(left), unit="part")


def fingerprint(*what: Any) -> str:
    """Return in short what is packed, and how. Paths may hold bytes that are no UTF-8."""
    return hashlib.sha256(repr(what).encode(errors="surrogateescape")).hexdigest()


def reject_unreadable(bad: Sequence[ConfigError]) -> None:
    """Raise `ConfigError` with all of them at once: what is written anew in its place costs no more than its part."""
    for rejected in bad[1:]:
        print(errors.printable(f"{rejected.key}={rejected.value}: {rejected.rule}"), file=sys.stderr)
    if bad:
        more = f" ({len(bad) - 1} more are named above)" if len(bad) > 1 else ""
        raise ConfigError(bad[0].key, bad[0].value, bad[0].rule + more, bad[0].fix)


def reject_without_room(out: str, size: int) -> None:
    """Raise `ConfigError` where the disk lacks room for so many bytes. Quotas show only when something is written."""
    free = shutil.disk_usage(os.path.dirname(out)).free
    part = packing.beside(out)[0]
    there = os.stat(part).st_blocks * 512 if os.path.exists(part) else 0
    if size > free + there:
        rule = f"needs {size / 1e9:.3g} GB; there are {(free + there) / 1e9:.3g} GB"
        raise ConfigError("out", out, rule, "make room there, another out=, or a smaller data.image_size=")


def summary(out: str, files: Sequence[str], *, what: str, checksum: str) -> list[str]:
    """Return the lines that say what was packed, and how many files it takes the place of."""
    before = len(files) + len({os.path.dirname(file) for file in files})
    after = sum(os.path.exists(out + more) for more in ("", ".json", ".tokenizer.json"))
    size = f"{os.path.getsize(out) / 1e6:.4g} MB"
    return [
        f"{out}: {what}, {size}, checksum {checksum[:16]}",
        f"inodes: {before} before (files and their folders), {after} after",
    ]
