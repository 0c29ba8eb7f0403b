"""Datasets of images: decoded from a file at each access, or gathered from one packed file."""

import os

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpc.data import packed_files
from hpc.data.fetching import empty_batch
from hpc.data.image_files import Samples, load_cropped
from hpc.data.packed_files import PackedFile


class ImageFiles(Dataset):
    """Image files as (uint8 (3, size, size), class number).

    Raises:
        ConfigError: a file cannot be decoded.
    """

    def __init__(self, samples: Samples, size: int) -> None:
        # Arrays, not lists: reference counts in a list of millions would make each worker copy its memory.
        self.files = np.array([os.fsencode(file) for file, _ in samples])
        self.labels = np.array([label for _, label in samples])
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(load_cropped(os.fsdecode(self.files[index]), self.size)), int(self.labels[index])


class PackedSamples(Dataset):
    """The images of a split of a packed file, in the order of the folder from which they were packed.

    A batch is one gather from the memory map, in the order of the sampler. The order is not changed to suit the disk:
    images of 224 pixels came at the disk's speed when they were read for the first time. Sorted indices, madvise and
    several threads were no faster, and MADV_RANDOM was ten times slower. In memory, the order costs nothing.
    """

    draws = False  # random numbers

    def __init__(self, packed: PackedFile, split: str, *, file: str) -> None:
        self.first, self.end = packed.splits[split]
        self.labels = packed.labels[self.first : self.end]
        self.map_arguments = (file, packed.offset, len(packed.labels), packed.image_bytes)  # each worker maps the file
        self.shape = (3, packed.image_size, packed.image_size)

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__(np.array([index]))
        return inputs[0], targets[0]

    def __getitems__(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return images uint8 (batch, 3, size, size) and class numbers int64 (batch,)."""
        images = empty_batch((len(indices), *self.shape), np.uint8)
        out = images.numpy().reshape(len(indices), -1)
        # With "clip", numpy writes into `out` without a copy between; the sampler gives no index that needs clipping.
        file, offset, num, image_bytes = self.map_arguments
        pixels = packed_files.map_pixels(file, offset, num=num, image_bytes=image_bytes)
        pixels.take(indices + self.first, axis=0, out=out, mode="clip")
        return images, torch.from_numpy(self.labels[indices])
