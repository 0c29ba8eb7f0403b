"""A folder of class folders of image files."""

from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hpc.data.data_module import DataModule, warp
from hpc.data.image_datasets import ImageFiles
from hpc.data.image_files import Samples, describe, list_images, reject_few_classes

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as pretrained weights expect


class Photos(DataModule):
    """Images float32 (3, image_size, image_size), normalised; targets are class numbers in the order of the names.

    Args:
        smallest_crop: training sees a random part of an image, at least this share of its area.
    """

    num_draws = 5

    def __init__(self, *, smallest_crop: float = 0.25, **loading: Any) -> None:
        super().__init__(**loading)
        self.smallest_crop = smallest_crop

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
        mean, std = _constants(inputs.device)
        return (inputs / 255 - mean) / std


@cache
def _constants(device: torch.device) -> list[Tensor]:
    """Mean and standard deviation; kept, as copying them to a GPU for each batch would wait for it."""
    return [torch.tensor(value, device=device).view(3, 1, 1) for value in (MEAN, STD)]


class Images(Photos):
    """Photos from a folder of class folders, decoded by worker processes whenever they are read.

    Args:
        dir: `<class>/*.{jpg,jpeg,png}` or `{train,val,test}/<class>/*`, see `image_files.list_images`.
        image_size: pixels; the shorter side is resized to it, the rest is cropped around the centre.
        num_classes: networks read `${data.num_classes}`; null is filled in by the check of the folder.
    """

    def __init__(self, dir: str, image_size: int = 224, num_classes: int | None = None, **photos: Any) -> None:
        super().__init__(**photos)
        self.dir = dir
        self.image_size = image_size
        self.num_classes = num_classes

    @cached_property
    def splits(self) -> dict[str, Samples]:
        classes, splits, _ = list_images(self.dir)
        if self.num_classes is not None:
            reject_few_classes(self.num_classes, len(classes))
        return splits

    def describe(self, split: str) -> dict[str, Any]:
        return describe(self.dir, self.splits[split])

    def dataset(self, split: str) -> Dataset:
        return ImageFiles(self.splits[split], self.image_size)
