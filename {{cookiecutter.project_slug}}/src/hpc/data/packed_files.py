"""Images packed into one HDF5 file: its shape, made and read. Imports no torch.

    images   uint8 (num, 3, size, size), one block: mapped into memory at its offset, as HDF5's own reading is slower
    labels   int64 (num,), numbers into `classes`
    names    the images' files, relative to the folder they came from, as bytes: a name need not be UTF-8
    classes  the names of the class folders, as bytes
    crc32    of the images in parts of `part` each

and the attributes `splits` (JSON: first and one past the last image of train, val and test), `part`, and `checksum`, of
all this. It is written last: a file that lacks it is unfinished and rejected.
"""

import functools
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc.config.errors import ConfigError
from hpc.data.file_parts import COPY_OR_PACK_AGAIN, FileParts
from hpc.data.image_files import Samples, load_cropped
from hpc.data.packing import write_at

if TYPE_CHECKING:
    import numpy as np

PART_BYTES = 1 << 24  # bytes
PAGE_BYTES = 4096


@dataclass(frozen=True)
class PackedFile:
    """What a file says of itself."""

    file: str
    offset: int  # bytes, of the first image
    image_size: int  # pixels
    part: int  # images
    labels: "np.ndarray"
    classes: tuple[str, ...]
    splits: dict[str, tuple[int, int]]
    crcs: tuple[int, ...]
    checksum: str

    @property
    def image_bytes(self) -> int:
        return 3 * self.image_size**2

    @property
    def parts(self) -> FileParts:
        num = len(self.labels)
        sizes = [(min(first + self.part, num) - first) * self.image_bytes for first in range(0, num, self.part)]
        return FileParts(self.file, self.offset, sizes, self.crcs, self.checksum)


def num_images_per_part(image_size: int) -> int:
    return max(1, min(1024, PART_BYTES // (3 * image_size**2)))


def create(
    file: str,
    *,
    names: Sequence[bytes],
    labels: Sequence[int],
    classes: Sequence[bytes],
    splits: Any,
    image_size: int,
) -> None:
    """A file with all but the images, whose place is kept, and what `finish` adds. Raises `OSError`."""
    import h5py
    import numpy as np

    part = num_images_per_part(image_size)
    made: Any
    with _os_errors(), h5py.File(file, "w", alignment_threshold=PAGE_BYTES, alignment_interval=PAGE_BYTES) as made:
        made["names"] = np.array(names, dtype="S")
        made["labels"] = np.array(labels, dtype=np.int64)
        made["classes"] = np.array(classes, dtype="S")
        made["crc32"] = np.zeros(-(-len(names) // part), np.uint32)
        made.attrs["splits"] = json.dumps(splits)
        made.attrs["part"] = part
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # the offset is known before anything is written
        early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((len(names), 3, image_size, image_size))
        h5py.h5d.create(made.id, b"images", h5py.h5t.STD_U8LE, space, early)


def write_part(samples: Samples, packed: PackedFile, number: int) -> tuple[int, int | None, list[ConfigError]]:
    """Decode the images of a part and put them in their place in the file.

    Returns:
        The part's number, its checksum or None, and which of its images cannot be decoded: then nothing is written.

    Raises:
        OSError: the disk is full, say.
    """
    import numpy as np

    decoded, bad = [], []
    for image, _ in samples[number * packed.part : (number + 1) * packed.part]:
        try:
            decoded.append(load_cropped(image, packed.image_size))
        except ConfigError as rejected:
            bad.append(rejected)
    if bad:
        return number, None, bad
    data = np.stack(decoded).data.cast("B")
    descriptor = os.open(packed.file, os.O_WRONLY)
    try:
        write_at(descriptor, data, offset=packed.offset + number * packed.part * packed.image_bytes)
    finally:
        os.close(descriptor)
    return number, zlib.crc32(data), []


def finish(file: str, crcs: Sequence[int]) -> str:
    """Note the checksums of the parts, then that of all: from here on the file is whole. Raises `OSError`."""
    import h5py
    import numpy as np

    made: Any
    with _os_errors(), h5py.File(file, "r+") as made:
        made["crc32"][...] = np.array(crcs, np.uint32)
        made.flush()
        made.attrs["checksum"] = checksum = _checksum(made)
    return checksum


def read(file: str, unfinished: bool = False) -> PackedFile:
    """What a packed file says of itself; the images stay where they are.

    Raises:
        ConfigError: it is none, was not packed to the end, or was cut short or changed.
    """
    import h5py

    made: Any
    fix = "on a login node: python tools/pack.py data.dir=<folder of class folders> out=<file>.h5"
    try:
        with h5py.File(file, "r") as made:
            checksum = made.attrs.get("checksum", "")
            if not checksum and not unfinished:
                raise ConfigError(
                    "data.file", file, "was packed to the end; this was not", "the same tools/pack.py again"
                )
            if checksum and checksum != _checksum(made):
                raise ConfigError(
                    "data.file", file, "says of itself what was packed; its checksum does not fit", COPY_OR_PACK_AGAIN
                )
            images, splits = made["images"], json.loads(made.attrs["splits"])
            if images.id.get_offset() is None or images.dtype.str != "|u1" or images.shape[1:2] != (3,):
                raise ValueError("its images are not one block of uint8")
            return PackedFile(
                file=file,
                offset=images.id.get_offset(),
                image_size=images.shape[-1],
                part=int(made.attrs["part"]),
                labels=made["labels"][...],
                classes=tuple(name.decode(errors="surrogateescape") for name in made["classes"][...]),
                splits={split: (first, end) for split, (first, end) in splits.items()},
                crcs=tuple(made["crc32"][...].tolist()),
                checksum=checksum,
            )
    except FileNotFoundError:
        raise ConfigError("data.file", file, "names a file; there is none", fix) from None
    except (OSError, KeyError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError("data.file", file, f"is a packed file, and whole: {error}", fix) from None


def reject_other_size(packed: PackedFile, image_size: int | None) -> None:
    """A network for other images than these would fail in its first step, or learn at another scale."""
    if image_size is not None and image_size != packed.image_size:
        rule = f"{packed.file} holds images of {packed.image_size} x {packed.image_size} pixels"
        raise ConfigError("data.image_size", image_size, rule, "data.image_size=null, or pack again")


@functools.lru_cache(maxsize=16)
def map_pixels(file: str, offset: int, num: int, image_bytes: int) -> "np.ndarray":
    """The images of a file, uint8 (num, image_bytes), mapped into memory; once per process and file."""
    import numpy as np

    return np.asarray(np.memmap(file, np.uint8, "r", offset, (num, image_bytes)))


@contextmanager
def _os_errors() -> Iterator[None]:
    """HDF5 tells of a full disk in several ways; here it is an OSError with its number."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if found := re.search(r"errno = (\d+)", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
        raise


def _checksum(made: Any) -> str:
    digest = hashlib.sha256(json.dumps([list(made["images"].shape), int(made.attrs["part"])]).encode())
    digest.update(made.attrs["splits"].encode())
    for name in ("names", "labels", "classes", "crc32"):
        digest.update(made[name][...].tobytes())
    return digest.hexdigest()
