"""Datasets of images: decoded from files whenever they are read, or gathered out of one packed file."""

import os

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpc.data import packed_files
from hpc.data.fetching import buffer
from hpc.data.image_files import Samples, fitted
from hpc.data.packed_files import Packed


class ImageFiles(Dataset):
    """(uint8 (3, size, size), class number). Raises `ConfigError` for a file that cannot be decoded."""

    def __init__(self, samples: Samples, size: int) -> None:
        # Arrays and not lists: workers would copy a list of millions as soon as they count references to its items.
        self.files = np.array([os.fsencode(file) for file, _ in samples])
        self.labels = np.array([label for _, label in samples])
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(fitted(os.fsdecode(self.files[index]), self.size)), int(self.labels[index])


class PackedSamples(Dataset):
    """The images of a split, in the order of the folder they came from.

    A batch is one gather out of the memory map, in the order that the sampler gives. Nothing is shuffled to suit the
    disk. Read for the first time, images of 224 pixels came at the disk's speed; sorted, announced by madvise, or by
    several threads they came no faster, and with MADV_RANDOM ten times slower. From memory order costs nothing.
    """

    draws = False  # random numbers

    def __init__(self, packed: Packed, split: str, *, file: str) -> None:
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
