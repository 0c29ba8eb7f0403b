"""The format of packed files: an array, `x.npy`, and notes beside it, `x.npy.json`. No torch here.

The notes have, of either kind of file,
    dtype       of the array
    parts       [items, crc32] of each part of the array, in order; an item is an image or a token
    checksum    of the notes; through the parts, it covers the array
of images, an array (num, 3, size, size),
    classes     the names of the class folders
    splits      the first image and one past the last image of train, val and test
    labels      of each image, an index into `classes`
    names       of each image, its file below the folder that was packed
and of tokens, an array (num,),
    vocab_size, bytes_per_token, tokenizer, end_of_text, sources    see `pack_text`
The file gets its name when it is whole, after its notes have theirs.
"""

import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError
from hpc.system import process

if TYPE_CHECKING:
    import numpy as np

SUFFIX = ".npy"
HEADER_BYTES = 4096  # a page, so that an image of whole pages does not begin in the middle of one
BLOCK_BYTES = 1 << 20  # that are read at a time
COPY_OR_PACK_AGAIN = "copy it again, or pack again: python tools/pack.py ..."


@dataclass(frozen=True)
class FileParts:
    """The parts of a packed file: its bytes from `offset` to the end of the last part."""

    file: str
    offset: int  # bytes
    sizes: Sequence[int]  # bytes
    crcs: Sequence[int]  # zlib.crc32
    checksum: str  # of all that was packed, in hex


def npy_header(dtype: str, shape: Sequence[int]) -> bytes:
    """Return the HEADER_BYTES that come before the array in a .npy file."""
    import numpy as np

    stream = io.BytesIO()
    form: dict[str, Any] = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(stream, form)
    beginning, text = stream.getvalue()[:8], stream.getvalue()[10:-1]
    length = HEADER_BYTES - 10
    return beginning + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"


def map_array(file: str, *, config_key: str) -> "np.memmap":
    """Map the array of a .npy file into memory.

    Raises:
        ConfigError: the file cannot be read, or is another one.
    """
    import numpy as np

    try:
        return np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # a damaged header raises errors of many kinds
        rule = f"The file must be a whole array in a .npy file. This one cannot be read: {error}"
        raise ConfigError(config_key, file, rule, "write the file again") from None


def notes_checksum(notes: dict[str, Any]) -> str:
    """Return a checksum of the notes without their own checksum."""
    rest = {key: value for key, value in notes.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_notes(file: str, array: "np.memmap", *, config_key: str) -> dict[str, Any] | None:
    """Return the notes of a packed file, given its array; None if it has none.

    Raises:
        ConfigError: the notes cannot be read, or are those of another file.
    """
    path = f"{file}.json"
    if not os.path.exists(path):
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            notes = json.load(stream)
        num, dtype = sum(items for items, _ in notes["parts"]), notes["dtype"]
        is_unchanged = notes["checksum"] == notes_checksum(notes)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        rule = f"The file must be as tools/pack.py has written it ({reason})"
        raise ConfigError(config_key, path, rule, COPY_OR_PACK_AGAIN) from None
    if not is_unchanged or (len(array), str(array.dtype)) != (num, dtype):
        rule = f"The file must hold {num} items of {dtype}, as noted in {path}; "
        rule += f"it holds {len(array)} items of {array.dtype}" if is_unchanged else "these notes have changed"
        raise ConfigError(config_key, file, rule, COPY_OR_PACK_AGAIN)
    return notes


def file_parts(file: str, array: "np.memmap", notes: dict[str, Any]) -> FileParts:
    """Return the parts of a packed file, given its array and its notes."""
    item_bytes = array[:1].nbytes
    sizes = [num * item_bytes for num, _ in notes["parts"]]
    return FileParts(file, array.offset, sizes, [crc for _, crc in notes["parts"]], notes["checksum"])


def verify_checksums(
    parts: FileParts, *, config_key: str, max_parts: int | None = None, on_part: Callable[[], object] = lambda: None
) -> int:
    """Compare parts with their checksums; return how many were compared.

    Args:
        config_key: the key of the config that names the file, for errors.
        max_parts: compare at most so many: the first, the last, and some between; None: all of them.
        on_part: called after each part.

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
    crcs = []
    try:
        file_size = os.path.getsize(parts.file)
        if file_size < end:
            rule = f"The file must have {end} bytes, as when it was packed; it has {file_size}"
            raise ConfigError(config_key, parts.file, rule, COPY_OR_PACK_AGAIN)
        with ThreadPoolExecutor(process.num_cores()) as pool:  # crc32 and read release the GIL
            for crc in pool.map(lambda i: range_checksum(parts.file, start=starts[i], size=parts.sizes[i]), numbers):
                crcs.append(crc)
                on_part()
    except OSError as error:
        rule = f"The file cannot be read: {error.strerror}"
        raise ConfigError(config_key, parts.file, rule, COPY_OR_PACK_AGAIN) from None
    for number, crc in zip(numbers, crcs, strict=True):
        if crc != parts.crcs[number]:
            end = starts[number] + parts.sizes[number]
            rule = f"The file must hold what was packed; its bytes {starts[number]} to {end} have changed"
            raise ConfigError(config_key, parts.file, rule, COPY_OR_PACK_AGAIN)
    return len(crcs)


def range_checksum(file: str, *, start: int, size: int) -> int:
    """Return the zlib.crc32 of `size` bytes of a file from byte `start` on, read in blocks."""
    value, end = 0, start + size
    with open(file, "rb", buffering=0) as stream:
        stream.seek(start)
        while start < end and (piece := stream.read(min(BLOCK_BYTES, end - start))):
            value, start = zlib.crc32(piece, value), start + len(piece)
    return value
