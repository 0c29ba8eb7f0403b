"""Datasets of images that are decoded from a file at each access."""

import os

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpc.data.image_files import Samples, load_cropped


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
