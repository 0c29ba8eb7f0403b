"""Images from one file that tools/pack.py made: the same images, in the same order, as from the folder it came from."""

import os
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpc.data import packed_files
from hpc.data.fetching import buffer
from hpc.data.file_parts import Parts
from hpc.data.image_files import reject_few_classes
from hpc.data.packed_files import Packed

from .images import Photos


class PackedImages(Photos):
    """As `images.Images`, from one large file.

    Args:
        file: made by tools/pack.py.
        image_size, num_classes: as packed; null is filled in by the check of the file.
    """

    def __init__(self, file: str, image_size: int | None = None, num_classes: int | None = None, **photos: Any) -> None:
        super().__init__(**photos)
        self.file = file
        self.image_size = image_size
        self.num_classes = num_classes

    @cached_property
    def packed(self) -> Packed:
        found = packed_files.read(self.file)
        packed_files.reject_other_size(found, self.image_size)
        if self.num_classes is not None:
            reject_few_classes(self.num_classes, len(found.classes))
        return found

    def to_stage(self) -> list[Parts]:
        return [self.packed.parts]

    def describe(self, split: str) -> dict[str, Any]:
        """As noted when the file was packed, and the size it has: terabytes are not read."""
        packed = self.packed
        known = {"classes": list(packed.classes), "images": list(packed.splits[split])}
        return known | {"checksum": packed.checksum[:16], "bytes": os.path.getsize(self.file)}

    def dataset(self, split: str) -> Dataset:
        return PackedSamples(self.packed, split, self.nearest(self.packed.parts))


class PackedSamples(Dataset):
    """The images of a split, in the order of the folder they came from.

    A batch is one gather out of the memory map, in the order that the sampler gives. Nothing is shuffled to suit the
    disk. Read for the first time, images of 224 pixels came at the disk's speed; sorted, announced by madvise, or by
    several threads they came no faster, and with MADV_RANDOM ten times slower. From memory order costs nothing.
    """

    draws = False  # random numbers

    def __init__(self, packed: Packed, split: str, file: str) -> None:
        self.first, self.end = packed.splits[split]
        self.labels = packed.labels[self.first : self.end]
        self.place = (file, packed.offset, len(packed.labels), packed.image_bytes)  # mapped in each worker by itself
        self.shape = (3, packed.image_size, packed.image_size)

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__(np.array([index]))
        return inputs[0], targets[0]

    def __getitems__(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Images uint8 (batch, 3, size, size) and class numbers int64 (batch,)."""
        images = buffer((len(indices), *self.shape), np.uint8)
        out = images.numpy().reshape(len(indices), -1)
        # "clip" is what lets numpy write into `out` without a copy between; the sampler gives no index to clip.
        packed_files.pixels(*self.place).take(indices + self.first, axis=0, out=out, mode="clip")
        return images, torch.from_numpy(self.labels[indices])
