"""Pack a folder of image files into one file, decoded and resized. No torch here."""

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from hpc.config import errors
from hpc.config.errors import ConfigError
from hpc.data import image_files
from hpc.data.image_files import Samples, load_cropped
from hpc.packed.writing import write_packed_file

PART_BYTES = 1 << 24


def pack(data: Any, out: str) -> tuple[list[str], str, str]:
    """Pack the images below `data.dir` into the file `out`.

    Returns:
        The image files, what the packed file holds, and a command that trains on it.

    Raises:
        ConfigError: there are no such images, one cannot be decoded, or the disk lacks room.
        OSError: the file cannot be written.
    """
    classes, of_splits, ignored = image_files.list_images(data.dir)
    if ignored:
        print(errors.make_printable(f"note: {ignored}"), file=sys.stderr)
    size = data.image_size
    samples, splits = _concatenate(of_splits)
    files = [file for file, _ in samples]
    parts = split_into_parts(samples, size)
    notes = write_packed_file(
        out,
        partial(decode_part, parts, size),
        len(parts),
        title="packing images",
        dtype="uint8",
        item_shape=(3, size, size),
        num_bytes=len(samples) * 3 * size**2,
        describe=lambda num: {
            "classes": classes,
            "splits": splits,
            "labels": [label for _, label in samples],
            "names": [os.path.relpath(file, os.path.expanduser(data.dir)) for file in files],
        },
    )
    content = f"{len(samples)} images of {size} x {size} pixels in {len(classes)} classes"
    content += f", checksum {notes['checksum'][:16]}"
    return files, content, f"python train.py data=packed data.file={shlex.quote(out)} model=resnet18 trainer=gpu"


def split_into_parts(samples: Samples, size: int) -> list[Samples]:
    """Return the samples, in order, in parts of about PART_BYTES of pixels."""
    num = max(1, min(1024, PART_BYTES // (3 * size**2)))
    return [samples[first : first + num] for first in range(0, len(samples), num)]


def decode_part(parts: Sequence[Samples], size: int, number: int) -> bytes | list[ConfigError]:
    """Return the pixels of a part, or an error for each of its images that cannot be decoded."""
    pixels, unreadable = [], []
    for file, _ in parts[number]:
        try:
            pixels.append(load_cropped(file, size).tobytes())
        except ConfigError as error:
            unreadable.append(error)
    return unreadable or b"".join(pixels)


def _concatenate(splits: dict[str, Samples]) -> tuple[Samples, dict[str, Sequence[int]]]:
    """Return all samples in one list, and for each split its first sample and one past its last in that list.

    The splits val and test may be the same samples, which are then in the list once.
    """
    samples: Samples = []
    ranges: dict[str, Sequence[int]] = {}
    for split, split_samples in splits.items():
        if split == "test" and split_samples is splits["val"]:
            ranges["test"] = ranges["val"]
        else:
            ranges[split] = [len(samples), len(samples) + len(split_samples)]
            samples += split_samples
    return samples, ranges
