"""A large file in parts that each have a checksum: a few can be verified, or all of them in parallel. No torch here."""

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hpc.config.errors import ConfigError
from hpc.system import process

COPY_OR_PACK_AGAIN = "copy it again, or pack again: python tools/pack.py ..."


@dataclass(frozen=True)
class FileParts:
    """The parts of a packed file: its bytes from `offset` to the end of the last part."""

    file: str
    offset: int  # bytes
    sizes: Sequence[int]  # bytes
    crcs: Sequence[int]  # zlib.crc32
    checksum: str  # of all that was packed, in hex


def verify_checksums(parts: FileParts, *, config_key: str, max_parts: int | None = None) -> int:
    """Compare parts with their checksums; return how many were compared.

    Args:
        config_key: the key of the config that names the file, for errors.
        max_parts: compare at most so many: the first, the last, and some between; None: all of them.

    Raises:
        ConfigError: the file cannot be read, is too short, or holds other bytes than were packed.
    """
    starts, end = [], parts.offset
    for size in parts.sizes:
        starts.append(end)
        end += size
    num = len(starts)
    numbers = range(num)
    if max_parts is not None and num > max_parts:
        numbers = [i * (num - 1) // (max_parts - 1) for i in range(max_parts)]
    try:
        file_size = os.path.getsize(parts.file)
        if file_size < end:
            rule = f"The file must have {end} bytes, as when it was packed; it has {file_size}"
            raise ConfigError(config_key, parts.file, rule, COPY_OR_PACK_AGAIN)
        with ThreadPoolExecutor(process.num_cores()) as pool:  # crc32 and read release the GIL
            crcs = list(pool.map(lambda i: range_checksum(parts.file, start=starts[i], size=parts.sizes[i]), numbers))
    except OSError as error:
        rule = f"The file cannot be read: {error.strerror}"
        raise ConfigError(config_key, parts.file, rule, COPY_OR_PACK_AGAIN) from None
    for number, crc in zip(numbers, crcs, strict=True):
        if crc != parts.crcs[number]:
            end = starts[number] + parts.sizes[number]
            rule = f"The file must hold what was packed; its bytes {starts[number]} to {end} have changed"
            raise ConfigError(config_key, parts.file, rule, COPY_OR_PACK_AGAIN)
    return len(crcs)


def range_checksum(file: str, *, start: int, size: int, block: int = 1 << 20) -> int:
    """Return the zlib.crc32 of `size` bytes of a file from byte `start` on, read in blocks."""
    value, end = 0, start + size
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while start < end and (piece := stream.read(min(block, end - start))):
            value, start = zlib.crc32(piece, value), start + len(piece)
    return value
