"""Images from one file that tools/pack.py made: the same images, in the same order, as from the folder it came from."""

import os
from functools import cached_property
from typing import Any

from torch.utils.data import Dataset

from hpc.data import packed_files
from hpc.data.file_parts import Parts
from hpc.data.image_datasets import PackedSamples
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
        return PackedSamples(self.packed, split, file=self.nearest(self.packed.parts))
