"""Images in one file made by tools/pack.py: the same images, in the same order, as in the folder they came from."""

import os
from functools import cached_property
from typing import Any

from hpc.data.image_files import reject_fewer_outputs_than_classes
from hpc.packed import packed_images
from hpc.packed.datasets import PackedSamples
from hpc.packed.packed_file import FileParts
from torch.utils.data import Dataset

from .images import ImageDataModule


class PackedImages(ImageDataModule):
    """Images in one large file, which is faster than many small ones.

    Args:
        file: made by tools/pack.py.
        image_size: pixels, as packed. null: `_check_` in configs/data/packed.yaml fills it in.
        num_classes: as packed; null: filled in likewise. Model configs read it as `${data.num_classes}`.
        loading: further arguments of ImageDataModule: smallest_crop, global_batch_size, seed, num_workers, ...
    """

    def __init__(
        self, file: str, image_size: int | None = None, num_classes: int | None = None, **loading: Any
    ) -> None:
        super().__init__(**loading)
        self.file = file
        self.image_size = image_size
        self.num_classes = num_classes

    @cached_property
    def packed(self) -> packed_images.PackedImages:
        """The file's notes: classes, splits, checksums."""
        packed = packed_images.read_packed_images(self.file)
        packed_images.reject_image_size_mismatch(packed, self.image_size)
        if self.num_classes is not None:
            reject_fewer_outputs_than_classes(self.num_classes, len(packed.classes))
        return packed

    def files_to_stage(self) -> list[FileParts]:
        """Return the file, which `data.stage=true` copies to the node before training."""
        return [self.packed.parts]

    def describe(self, split: str) -> dict[str, Any]:
        """Return what a resumed run compares: the checksum of the notes and the size, as reading all takes too long."""
        packed = self.packed
        images = {"classes": list(packed.classes), "images": list(packed.splits[split])}
        return images | {"checksum": packed.parts.checksum[:16], "bytes": os.path.getsize(self.file)}

    def dataset(self, split: str) -> Dataset:
        return PackedSamples(self.packed, split, file=self.local_path(self.packed.parts))
