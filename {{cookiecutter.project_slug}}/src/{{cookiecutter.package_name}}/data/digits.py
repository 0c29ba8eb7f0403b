"""Handwritten digits: 1797 images of 8x8 pixels, in the file beside this one.

They are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn's `load_digits` gives them.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hpc.config.errors import ConfigError
from hpc.data.data_module import DataModule, warp_images
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

# The images are sorted by digit and counted off in tens: of each ten, 7 are for training, 1 for validation, 2 for the
# test. The seed does not change this, so every run is tested on the same images.
PLACES_IN_TEN = {"train": range(0, 7), "val": range(7, 8), "test": range(8, 10)}


class Digits(DataModule):
    """Images, float32 (1, 8, 8), with about zero mean and unit variance; targets from 0 to 9.

    Args:
        num_classes: the network's number of classes, at least 10; model configs read it as `${data.num_classes}`.
        loading: further arguments of DataModule: global_batch_size, seed, num_workers, ...
    """

    num_draws = 4  # random numbers per sample for `augment`

    def __init__(self, num_classes: int = 10, **loading: Any) -> None:
        super().__init__(**loading)
        if num_classes < 10:
            rule = "must be at least 10, the number of digits"
            raise ConfigError("data.num_classes", num_classes, rule=rule, fix="data.num_classes=10")
        self.num_classes = num_classes

    def dataset(self, split: str) -> Dataset:
        pixels, digits = read_digits()
        images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        indices = split_indices(split, digits)
        return TensorDataset(images[indices], torch.tensor(digits)[indices])

    def augment(self, inputs: Tensor, draws: Tensor) -> Tensor:
        """Rotate by up to 10 degrees, scale by up to 10 %, and shift by up to 0.75 pixels."""
        angle, scale, right, down = (2 * draws - 1).unbind(1)
        angle, scale = angle * math.radians(10), 1 + 0.1 * scale
        right, down = right * 0.75 / 4, down * 0.75 / 4  # coordinates run from -1 to 1, so a pixel of 8 is 1/4 wide
        cos, sin = scale * angle.cos(), scale * angle.sin()
        return warp_images(inputs, torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3))

    def prepare_inputs(self, inputs: Tensor) -> Tensor:
        """Normalize by the mean and the standard deviation of all pixels."""
        return (inputs - 0.305) / 0.376


@cache
def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return pixels (1797, 64) from 0 to 16, and digits (1797,)."""
    with np.load(Path(__file__).with_name("digits.npz")) as arrays:
        return arrays["pixels"].astype(float), arrays["digits"].astype(int)


def split_indices(split: str, digits: np.ndarray) -> np.ndarray:
    """Return the indices of the samples of a split, in ascending order: about the same share of every digit."""
    by_class = np.argsort(digits, kind="stable")
    return np.sort(by_class[np.isin(np.arange(len(digits)) % 10, PLACES_IN_TEN[split])])
