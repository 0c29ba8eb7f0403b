"""Parts that packing of images and of text share: progress, room on the disk, unreadable files, the last lines."""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpc.config.errors import ConfigError
from hpc.data import packing
from hpc.system import process


def map_with_progress(work: Callable[[int], Any], numbers: Sequence[int], *, title: str) -> Iterator[Any]:
    """Yield work(number) for each part's number, in order, from all cores; show a progress bar."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread, as processes are forked
    if numbers:
        num_processes = min(process.num_cores(), len(numbers))
        results = packing.map_in_order(work, numbers, num_processes=num_processes)
        yield from tqdm(results, f"{title} ({num_processes} processes)", len(numbers), unit="part")


def packing_checksum(*plan: Any) -> str:
    """Return a checksum of what is packed, and how. Paths may hold bytes that are not UTF-8."""
    return hashlib.sha256(repr(plan).encode(errors="surrogateescape")).hexdigest()


def reject_unreadable(unreadable: Sequence[ConfigError]) -> None:
    """Raise the first of these errors, after all others were printed: they can be repaired together."""
    for error in unreadable[1:]:
        print(str(error).splitlines()[0], file=sys.stderr)
    if unreadable:
        first = unreadable[0]
        more = f" ({len(unreadable) - 1} more are named above)" if len(unreadable) > 1 else ""
        raise ConfigError(first.key, first.value, first.rule + more, first.fix)


def reject_full_disk(out: str, num_bytes: int) -> None:
    """Raise `ConfigError` if the disk lacks room for so many bytes. Quotas show only when something is written."""
    free = shutil.disk_usage(os.path.dirname(out)).free
    unfinished = packing.unfinished_paths(out)[0]
    written = os.stat(unfinished).st_blocks * 512 if os.path.exists(unfinished) else 0
    if num_bytes > free + written:
        rule = f"The file needs {num_bytes / 1e9:.3g} GB, but the disk has {(free + written) / 1e9:.3g} GB free"
        raise ConfigError("out", out, rule, "make room there, another out=, or a smaller data.image_size=")


def describe_result(out: str, files: Sequence[str], *, content: str, checksum: str) -> list[str]:
    """Return lines that say what was packed, and how many files it replaces."""
    before = len(files) + len({os.path.dirname(file) for file in files})
    after = sum(os.path.exists(out + suffix) for suffix in ("", ".json", ".tokenizer.json"))
    size = f"{os.path.getsize(out) / 1e6:.4g} MB"
    return [
        f"{out}: {content}, {size}, checksum {checksum[:16]}",
        f"inodes: {before} before (files and their folders), {after} after",
    ]
