"""Packed images: what the file and its notes say of them, read without torch. `packed_file` describes the format."""

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc.config.errors import ConfigError
from hpc.packed.packed_file import SUFFIX, FileParts, file_parts, map_array, read_notes

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class PackedImages:
    """A file of packed images without its pixels."""

    image_size: int  # pixels
    labels: "np.ndarray"
    classes: tuple[str, ...]
    splits: dict[str, tuple[int, int]]
    parts: FileParts


def read_packed_images(file: str) -> PackedImages:
    """Return what a file of packed images holds beside its pixels, which are not read.

    Raises:
        ConfigError: it is not such a file, or it was cut short or changed.
    """
    import numpy as np

    reject_hdf5("data.file", file)
    fix = f"python tools/pack.py data.dir=<folder of class folders> out=<file>{SUFFIX}"
    if not os.path.exists(file):
        raise ConfigError("data.file", file, "must be an existing file", fix)
    array = map_array(file, config_key="data.file")
    notes = read_notes(file, array, config_key="data.file")
    if notes is None or "classes" not in notes or array.shape[1:] != (3, *array.shape[-1:] * 2):
        rule = f"The file must hold images that tools/pack.py has packed, with its notes {os.path.basename(file)}.json"
        raise ConfigError("data.file", file, rule, fix)
    return PackedImages(
        image_size=array.shape[-1],
        labels=np.array(notes["labels"], np.int64),
        classes=tuple(notes["classes"]),
        splits={split: (first, end) for split, (first, end) in notes["splits"].items()},
        parts=file_parts(file, array, notes),
    )


def reject_hdf5(key: str, file: str) -> None:
    """Raise `ConfigError` for a file in the format of earlier versions, or its name."""
    if file.endswith((".h5", ".hdf5")):
        rule = f"must be a {SUFFIX} file, as packed images are: those that were packed into HDF5 must be packed again"
        fix = f"python tools/pack.py data.dir=<folder of class folders> out={os.path.splitext(file)[0]}{SUFFIX}"
        raise ConfigError(key, file, rule, fix)


def reject_image_size_mismatch(packed: PackedImages, image_size: int | None) -> None:
    """Raise `ConfigError` for another image size: the network would fail in its first step, or see another scale."""
    if image_size is not None and image_size != packed.image_size:
        rule = f"must be {packed.image_size}, the size of the images in {packed.parts.file}"
        raise ConfigError("data.image_size", image_size, rule, "data.image_size=null, or pack again")


@functools.lru_cache(maxsize=16)
def map_pixels(file: str) -> "np.ndarray":
    """Map the images of a file into memory, once per process and file; return uint8 (num, bytes of an image)."""
    import numpy as np

    array = map_array(file, config_key="data.file")
    return np.asarray(array.reshape(len(array), -1))
