"""Pack a folder of image files into one HDF5 file, decoded and resized. No torch here."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpc.config import errors
from hpc.config.errors import ConfigError
from hpc.data import image_files, packed_files, packing
from hpc.data.image_files import Samples
from hpc.data.pack_progress import (
    describe_result,
    map_with_progress,
    packing_checksum,
    reject_full_disk,
    reject_unreadable,
)


def pack(data: Any, out: str) -> list[str]:
    """Pack the images below `data.dir` into the file `out`; return lines that describe it.

    Raises:
        ConfigError: there are no such images, one cannot be decoded, or the disk lacks room.
        OSError: the file cannot be written.
    """
    classes, splits, ignored = image_files.list_images(data.dir)
    if ignored:
        print(errors.make_printable(f"note: {ignored}"), file=sys.stderr)
    folder, size = os.path.expanduser(data.dir), data.image_size
    samples, ranges = _concatenate(splits)
    names = [os.fsencode(os.path.relpath(file, folder)) for file, _ in samples]
    reject_full_disk(out, len(samples) * 3 * size**2)
    images_per_part = packed_files.num_images_per_part(size)

    def files_of_part(number: int) -> list[str]:
        return [file for file, _ in samples[number * images_per_part : (number + 1) * images_per_part]]

    def create(part: str) -> None:
        packed_files.create(
            part,
            names=names,
            labels=[label for _, label in samples],
            classes=[os.fsencode(name) for name in classes],
            splits=ranges,
            image_size=size,
        )

    plan = packing_checksum("images", size, ranges, names)
    with packing.open_journal(out, plan, files_of_part=files_of_part) as (done, note):
        unfinished = packing.unfinished_paths(out)[0]
        if not os.path.exists(unfinished):
            create(f"{unfinished}.new")
            os.replace(f"{unfinished}.new", unfinished)
        _write_parts(
            samples, packed_files.read_packed_header(unfinished, unfinished=True), files_of_part, done=done, note=note
        )
        checksum = packed_files.finish(unfinished, [done[number] for number in range(len(done))])
        packing.publish(out)
    content = f"{len(samples)} images of {size} x {size} pixels in {len(classes)} classes"
    command = f"python train.py data=packed data.file={shlex.quote(out)} model=resnet18 trainer=gpu"
    return [*describe_result(out, [file for file, _ in samples], content=content, checksum=checksum), command]


def _write_parts(
    samples: Samples,
    packed: packed_files.PackedFile,
    files_of_part: Callable[[int], list[str]],
    *,
    done: dict[int, int],
    note: Callable[[int, str, int], None],
) -> None:
    """Write the parts that are not done yet, and note their checksums. Raise `ConfigError` for unreadable images."""
    missing = [number for number in range(len(packed.crcs)) if number not in done]
    work = partial(packing.run_with_fingerprint, partial(packed_files.write_part, samples, packed), files_of_part)
    unreadable: list[ConfigError] = []
    for state, (number, crc, part_errors) in map_with_progress(work, missing, title="packing images"):
        unreadable += part_errors
        if not part_errors:
            done[number] = crc
            note(number, state, crc)
    reject_unreadable(unreadable)


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
