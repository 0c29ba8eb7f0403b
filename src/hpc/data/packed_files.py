"""Images packed into one HDF5 file: its format, written and read. No torch here.

    images   uint8 (num, 3, size, size), one block: mapped into memory at its offset, as HDF5's own reading is slower
    labels   int64 (num,), indices into `classes`
    names    the images' files, relative to the folder they came from, as bytes: a name need not be UTF-8
    classes  the names of the class folders, as bytes
    crc32    one for every `part` images

It has the attributes `splits` (JSON: first and one past the last image of train, val and test), `part`, and `checksum`
of all this but the images. The checksum is written last: a file without it is unfinished, and rejected.
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

PART_BYTES = 1 << 24
PAGE_BYTES = 4096


@dataclass(frozen=True)
class PackedFile:
    """A packed file without its pixels."""

    file: str
    offset: int  # bytes before the first image
    image_size: int  # pixels
    images_per_part: int
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
        firsts = range(0, num, self.images_per_part)
        sizes = [(min(first + self.images_per_part, num) - first) * self.image_bytes for first in firsts]
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
    """Create a file with everything but the images, for which it leaves room, and what `finish` adds.

    Raises:
        OSError: the disk is full, for example.
    """
    import h5py
    import numpy as np

    images_per_part = num_images_per_part(image_size)
    hdf5: Any
    with _hdf5_os_errors(), h5py.File(file, "w", alignment_threshold=PAGE_BYTES, alignment_interval=PAGE_BYTES) as hdf5:
        hdf5["names"] = np.array(names, dtype="S")
        hdf5["labels"] = np.array(labels, dtype=np.int64)
        hdf5["classes"] = np.array(classes, dtype="S")
        hdf5["crc32"] = np.zeros(-(-len(names) // images_per_part), np.uint32)
        hdf5.attrs["splits"] = json.dumps(splits)
        hdf5.attrs["part"] = images_per_part
        early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)  # the offset is known before anything is written
        early.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        space = h5py.h5s.create_simple((len(names), 3, image_size, image_size))
        h5py.h5d.create(hdf5.id, b"images", h5py.h5t.STD_U8LE, space, early)


def write_part(samples: Samples, packed: PackedFile, number: int) -> tuple[int, int | None, list[ConfigError]]:
    """Decode the images of a part and write them at their place in the file.

    Returns:
        The part's number, its checksum, and an error for each image that cannot be decoded. If there is one, the
        checksum is None and nothing is written.

    Raises:
        OSError: the disk is full, for example.
    """
    import numpy as np

    decoded, errors = [], []
    for image, _ in samples[number * packed.images_per_part : (number + 1) * packed.images_per_part]:
        try:
            decoded.append(load_cropped(image, packed.image_size))
        except ConfigError as error:
            errors.append(error)
    if errors:
        return number, None, errors
    data = np.stack(decoded).data.cast("B")
    descriptor = os.open(packed.file, os.O_WRONLY)
    try:
        write_at(descriptor, data, offset=packed.offset + number * packed.images_per_part * packed.image_bytes)
    finally:
        os.close(descriptor)
    return number, zlib.crc32(data), []


def finish(file: str, crcs: Sequence[int]) -> str:
    """Write the checksums of the parts, then the checksum of the file, which makes it whole; return the latter.

    Raises:
        OSError: the disk is full, for example.
    """
    import h5py
    import numpy as np

    hdf5: Any
    with _hdf5_os_errors(), h5py.File(file, "r+") as hdf5:
        hdf5["crc32"][...] = np.array(crcs, np.uint32)
        hdf5.flush()
        hdf5.attrs["checksum"] = checksum = _checksum(hdf5)
    return checksum


def read_packed_header(file: str, unfinished: bool = False) -> PackedFile:
    """Return what a packed file holds beside its images, which are not read.

    Args:
        unfinished: accept a file that is still being packed.

    Raises:
        ConfigError: it is not a packed file, its packing was interrupted, or it was cut short or changed.
    """
    import h5py

    hdf5: Any
    fix = "on a login node: python tools/pack.py data.dir=<folder of class folders> out=<file>.h5"
    try:
        with h5py.File(file, "r") as hdf5:
            checksum = hdf5.attrs.get("checksum", "")
            if not checksum and not unfinished:
                rule = "The file must be packed to the end; packing this one was interrupted"
                raise ConfigError("data.file", file, rule, "the same tools/pack.py again")
            if checksum and checksum != _checksum(hdf5):
                rule = "The file must be as it was packed; its labels, names or checksums have changed"
                raise ConfigError("data.file", file, rule, COPY_OR_PACK_AGAIN)
            images, splits = hdf5["images"], json.loads(hdf5.attrs["splits"])
            if images.id.get_offset() is None or images.dtype.str != "|u1" or images.shape[1:2] != (3,):
                raise ValueError("its images are not one block of uint8")
            return PackedFile(
                file=file,
                offset=images.id.get_offset(),
                image_size=images.shape[-1],
                images_per_part=int(hdf5.attrs["part"]),
                labels=hdf5["labels"][...],
                classes=tuple(name.decode(errors="surrogateescape") for name in hdf5["classes"][...]),
                splits={split: (first, end) for split, (first, end) in splits.items()},
                crcs=tuple(hdf5["crc32"][...].tolist()),
                checksum=checksum,
            )
    except FileNotFoundError:
        raise ConfigError("data.file", file, "must be an existing file", fix) from None
    except (OSError, KeyError, ValueError, AttributeError, TypeError) as error:
        rule = f"The file must be one that tools/pack.py has packed: {error}"
        raise ConfigError("data.file", file, rule, fix) from None


def reject_image_size_mismatch(packed: PackedFile, image_size: int | None) -> None:
    """Raise `ConfigError` for another image size: the network would fail in its first step, or see another scale."""
    if image_size is not None and image_size != packed.image_size:
        rule = f"must be {packed.image_size}, the size of the images in {packed.file}"
        raise ConfigError("data.image_size", image_size, rule, "data.image_size=null, or pack again")


@functools.lru_cache(maxsize=16)
def map_pixels(file: str, offset: int, *, num: int, image_bytes: int) -> "np.ndarray":
    """Map the images of a file into memory, once per process and file; return uint8 (num, image_bytes)."""
    import numpy as np

    return np.asarray(np.memmap(file, np.uint8, "r", offset, (num, image_bytes)))


@contextmanager
def _hdf5_os_errors() -> Iterator[None]:
    """Raise an `OSError` with its number for a full disk, which HDF5 reports in several ways."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if errno := re.search(r"errno = (\d+)", str(error)):
            raise OSError(int(errno[1]), os.strerror(int(errno[1]))) from error
        raise


def _checksum(hdf5: Any) -> str:
    digest = hashlib.sha256(json.dumps([list(hdf5["images"].shape), int(hdf5.attrs["part"])]).encode())
    digest.update(hdf5.attrs["splits"].encode())
    for name in ("names", "labels", "classes", "crc32"):
        digest.update(hdf5[name][...].tobytes())
    return digest.hexdigest()
