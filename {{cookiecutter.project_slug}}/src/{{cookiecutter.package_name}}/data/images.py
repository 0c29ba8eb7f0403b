"""A folder of class folders of image files."""

import os
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .image_files import Samples, decode, list_images, refuse_few_classes
from .loading import DataModule, warp

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as pretrained weights expect


class Images(DataModule):
    """Images float32 (3, image_size, image_size), normalised; targets are class numbers in the order of the names.

    Args:
        dir: `<class>/*.{jpg,jpeg,png}` or `{train,val,test}/<class>/*`, see `image_files.list_images`.
        image_size: pixels; the shorter side is resized to it, the rest is cropped around the centre.
        num_classes: networks read `${data.num_classes}`; null is filled in by the check of the folder.
        smallest_crop: training sees a random part of an image, at least this share of its area.
    """

    num_draws = 5

    def __init__(
        self,
        dir: str,
        image_size: int = 224,
        num_classes: int | None = None,
        smallest_crop: float = 0.25,
        **loading: Any,
    ) -> None:
        super().__init__(**loading)
        self.dir = dir
        self.image_size = image_size
        self.num_classes = num_classes
        self.smallest_crop = smallest_crop

    @cached_property
    def splits(self) -> dict[str, Samples]:
        classes, splits = list_images(self.dir)
        if self.num_classes is not None:
            refuse_few_classes(self.num_classes, len(classes))
        return splits

    def dataset(self, split: str) -> Dataset:
        return ImageFiles(self.splits[split], self.image_size)

    def augment(self, inputs: Tensor, draws: Tensor) -> Tensor:
        """A random part of the image, 3:4 to 4:3, at full size; every other one mirrored (Szegedy et al., 2014)."""
        area = self.smallest_crop + (1 - self.smallest_crop) * draws[:, 0]
        ratio = (4 / 3) ** (2 * draws[:, 1] - 1)
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        x, y = (2 * draws[:, 2] - 1) * (1 - width), (2 * draws[:, 3] - 1) * (1 - height)
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0)
        zero = torch.zeros_like(x)
        return warp(inputs, torch.stack([width * mirror, zero, x, zero, height, y], dim=1).view(-1, 2, 3))

    def prepare_inputs(self, inputs: Tensor) -> Tensor:
        mean, std = (torch.tensor(value, device=inputs.device).view(3, 1, 1) for value in (MEAN, STD))
        return (inputs / 255 - mean) / std


class ImageFiles(Dataset):
    """(uint8 (3, size, size), class number). Raises `Refused` for a file that cannot be decoded."""

    def __init__(self, samples: Samples, size: int) -> None:
        # Arrays and not lists: workers would copy a list of millions as soon as they count references to its items.
        self.files = np.array([os.fsencode(file) for file, _ in samples])
        self.labels = np.array([label for _, label in samples])
        self.size = size

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image, ImageOps

        image = decode(os.fsdecode(self.files[index]), self.size)
        image = ImageOps.fit(image, (self.size, self.size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), int(self.labels[index])
