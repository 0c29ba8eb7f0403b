"""A large file in parts, each with its own checksum: a few of them can be verified, or all in parallel. No torch."""

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hpc.config.errors import ConfigError

COPY_OR_PACK_AGAIN = "copy it again, or pack again: python tools/pack.py ..."


@dataclass(frozen=True)
class FileParts:
    """Bytes `offset` to the end of the last part of a packed file. `checksum`: of all that was packed, in hex."""

    file: str
    offset: int
    sizes: Sequence[int]  # bytes
    crcs: Sequence[int]  # zlib.crc32
    checksum: str


def verify_parts(parts: FileParts, key: str, *, max_parts: int | None = None) -> int:
    """Compare parts with their checksums: all of them or `max_parts`, the first, the last and some between. How many.

    Raises:
        ConfigError: the file cannot be read, is too short, or holds other bytes than were packed.
    """
    starts, end = [], parts.offset
    for size in parts.sizes:
        starts.append(end)
        end += size
    num = len(starts)
    some = (
        range(num)
        if max_parts is None or num <= max_parts
        else [i * (num - 1) // (max_parts - 1) for i in range(max_parts)]
    )
    try:
        found = os.path.getsize(parts.file)
        if found < end:
            raise ConfigError(
                key, parts.file, f"has {end} bytes as it was packed; here are {found}", COPY_OR_PACK_AGAIN
            )
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:  # crc32 and read give the interpreter's lock up
            crcs = list(pool.map(lambda i: range_checksum(parts.file, start=starts[i], size=parts.sizes[i]), some))
    except OSError as error:
        raise ConfigError(key, parts.file, f"can be read; {error.strerror}", COPY_OR_PACK_AGAIN) from None
    for i, found in zip(some, crcs, strict=True):
        if found != parts.crcs[i]:
            rule = f"holds what was packed; bytes {starts[i]} to {starts[i] + parts.sizes[i]} are others"
            raise ConfigError(key, parts.file, rule, COPY_OR_PACK_AGAIN)
    return len(crcs)


def range_checksum(file: str, *, start: int, size: int, block: int = 1 << 20) -> int:
    """zlib.crc32 of so many bytes of a file."""
    value, end = 0, start + size
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while start < end and (piece := stream.read(min(block, end - start))):
            value, start = zlib.crc32(piece, value), start + len(piece)
    return value
