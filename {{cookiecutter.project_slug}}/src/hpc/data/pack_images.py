"""Pack a folder of image files into one HDF5 file, decoded and resized. Imports no torch."""

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from hpc.config import errors
from hpc.data import image_files, packed_files, packing
from hpc.data.image_files import Samples
from hpc.data.pack_progress import fingerprint, progress, reject_unreadable, reject_without_room, summary


def pack(data: Any, out: str) -> list[str]:
    """Pack the images below `data.dir`; return the lines that say so.

    Raises:
        ConfigError: there are no such images, one cannot be decoded, or the disk lacks room.
        OSError: the file cannot be written.
    """
    classes, splits, left_out = image_files.list_images(data.dir)
    if left_out:
        print(errors.make_printable(f"note: {left_out}"), file=sys.stderr)
    folder, size = os.path.expanduser(data.dir), data.image_size
    samples, ranges = _in_one_list(splits)
    names = [os.fsencode(os.path.relpath(file, folder)) for file, _ in samples]
    reject_without_room(out, len(samples) * 3 * size**2)
    per_part = packed_files.num_images_per_part(size)

    def of_part(number: int) -> list[str]:
        return [file for file, _ in samples[number * per_part : (number + 1) * per_part]]

    with packing.open_journal(out, fingerprint("images", size, ranges, names), files_of_part=of_part) as (done, note):
        part = packing.unfinished_paths(out)[0]
        if not os.path.exists(part):
            labels, words = [label for _, label in samples], [os.fsencode(name) for name in classes]
            packed_files.create(
                f"{part}.new", names=names, labels=labels, classes=words, splits=ranges, image_size=size
            )
            os.replace(f"{part}.new", part)
        shape = packed_files.read(part, unfinished=True)
        left, bad = [number for number in range(len(shape.crcs)) if number not in done], []
        work = partial(packing.work_with_state, partial(packed_files.write_part, samples, shape), of_part)
        for state, (number, crc, unreadable) in progress(work, left, title="packing images"):
            bad += unreadable
            if not unreadable:
                done[number] = crc
                note(number, state, crc)
        reject_unreadable(bad)
        checksum = packed_files.finish(part, [done[number] for number in range(len(done))])
        packing.publish(out)
    what = f"{len(samples)} images of {size} x {size} pixels in {len(classes)} classes"
    command = f"python train.py data=packed data.file={shlex.quote(out)} model=resnet18 trainer=gpu"
    return [*summary(out, [file for file, _ in samples], what=what, checksum=checksum), command]


def _in_one_list(splits: dict[str, Samples]) -> tuple[Samples, dict[str, Sequence[int]]]:
    """Return all samples, and of each split the first and one past the last; val and test may be the same ones."""
    samples: Samples = []
    ranges: dict[str, Sequence[int]] = {}
    for split, chosen in splits.items():
        if split == "test" and chosen is splits["val"]:
            ranges["test"] = ranges["val"]
        else:
            ranges[split] = [len(samples), len(samples) + len(chosen)]
            samples += chosen
    return samples, ranges
