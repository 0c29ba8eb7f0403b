"""Images in one folder per class."""

from functools import cache, cached_property
from typing import Any

import torch
from hpc.data.data_module import warp_images
from hpc.data.image_datasets import ImageFiles
from hpc.data.image_files import Samples, image_identity, list_images, reject_fewer_outputs_than_classes
from hpc.packed.staged_data import StagedDataModule
from torch import Tensor
from torch.utils.data import Dataset

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, as pretrained networks expect


class ImageDataModule(StagedDataModule):
    """Normalized images, float32 (3, image_size, image_size); targets are class numbers in the order of their names.

    Args:
        smallest_crop: smallest area of a random crop, as a share of the image.
        loading: further arguments of StagedDataModule: global_batch_size, seed, num_workers, ...
    """

    num_draws = 5  # random numbers per sample for `augment`

    def __init__(self, *, smallest_crop: float = 0.25, **loading: Any) -> None:
        super().__init__(**loading)
        self.smallest_crop = smallest_crop

    def augment(self, inputs: Tensor, draws: Tensor) -> Tensor:
        """Crop a random part with a ratio of 3:4 to 4:3, resize it, and mirror it with probability 1/2.

        As Szegedy et al. (2014) did.
        """
        area = self.smallest_crop + (1 - self.smallest_crop) * draws[:, 0]
        ratio = (4 / 3) ** (2 * draws[:, 1] - 1)
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        x, y = (2 * draws[:, 2] - 1) * (1 - width), (2 * draws[:, 3] - 1) * (1 - height)
        mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0)
        zero = torch.zeros_like(x)
        return warp_images(inputs, torch.stack([width * mirror, zero, x, zero, height, y], dim=1).view(-1, 2, 3))

    def prepare_inputs(self, inputs: Tensor) -> Tensor:
        """Normalize by the mean and the standard deviation of ImageNet."""
        mean, std = _mean_and_std(inputs.device)
        return (inputs / 255 - mean) / std


@cache
def _mean_and_std(device: torch.device) -> list[Tensor]:
    """Return MEAN and STD as tensors on a device. Cached: a copy for each batch would make the CPU wait for the GPU."""
    return [torch.tensor(value, device=device).view(3, 1, 1) for value in (MEAN, STD)]


class Images(ImageDataModule):
    """Images in a folder, decoded by worker processes each time they are read.

    Args:
        dir: holds `<class>/*.{jpg,jpeg,png}`, split by a hash of the names into 80 % train, 10 % val and 10 % test; or
            `{train,val,test}/<class>/*`. See `hpc.data.image_files.list_images`.
        image_size: pixels. The shorter side is resized to this size, the longer one is cropped around the centre.
        num_classes: number of class folders; model configs read it as `${data.num_classes}`. null: `_check_` in
            configs/data/images.yaml fills it in.
        loading: further arguments of ImageDataModule: smallest_crop, global_batch_size, seed, num_workers, ...
    """

    def __init__(self, dir: str, image_size: int = 224, num_classes: int | None = None, **loading: Any) -> None:
        super().__init__(**loading)
        self.dir = dir
        self.image_size = image_size
        self.num_classes = num_classes

    @cached_property
    def splits(self) -> dict[str, Samples]:
        """The files and targets of each split."""
        classes, splits, _ = list_images(self.dir)
        if self.num_classes is not None:
            reject_fewer_outputs_than_classes(self.num_classes, len(classes))
        return splits

    def describe(self, split: str) -> dict[str, Any]:
        """Return class names and checksums, which a resumed run compares: it rejects other images."""
        return image_identity(self.dir, self.splits[split])

    def dataset(self, split: str) -> Dataset:
        return ImageFiles(self.splits[split], self.image_size)
