"""scikit-learn's handwritten digits: 1797 real images of 8x8 pixels that come with the package."""

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from hpc.config.errors import ConfigError
from hpc.data.data_module import DataModule, warp

# Tenths of each class, in file order. They depend on no seed: every run is tested on the same images.
TENTHS = {"train": range(0, 7), "val": range(7, 8), "test": range(8, 10)}


class Digits(DataModule):
    """Images float32 (1, 8, 8) with about zero mean and unit variance; targets 0 to 9.

    Args:
        num_classes: 10; networks read `${data.num_classes}`.
    """

    num_draws = 4

    def __init__(self, num_classes: int = 10, **loading: Any) -> None:
        super().__init__(**loading)
        if num_classes < 10:
            raise ConfigError(
                "data.num_classes", num_classes, "must be at least 10, for ten digits", "data.num_classes=10"
            )
        self.num_classes = num_classes

    def dataset(self, split: str) -> Dataset:
        pixels, digits = read()
        images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
        chosen = indices_of(split, digits)
        return TensorDataset(images[chosen], torch.tensor(digits)[chosen])

    def augment(self, inputs: Tensor, draws: Tensor) -> Tensor:
        """Turned by up to 10 degrees, scaled by up to 10 %, shifted by up to 0.75 pixels."""
        turn, scale, right, down = (2 * draws - 1).unbind(1)
        turn, scale, right, down = turn * math.radians(10), 1 + 0.1 * scale, right * 0.75 / 4, down * 0.75 / 4
        cos, sin = scale * turn.cos(), scale * turn.sin()
        return warp(inputs, torch.stack([cos, -sin, right, sin, cos, down], dim=1).view(-1, 2, 3))

    def prepare_inputs(self, inputs: Tensor) -> Tensor:
        return (inputs - 0.305) / 0.376


@cache
def read() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) from 0 to 16, and digits (1797,): the package's file, read without the package's 300 modules.

    Raises:
        ConfigError: it is not there.
    """
    package = find_spec("sklearn")
    file = Path(str(package.origin)).parent / "datasets/data/digits.csv.gz" if package else None
    if not (file and file.is_file()):
        rule = f"lie in the package scikit-learn; {file or 'it'} is not there"
        raise ConfigError("data", "digits", rule, "pip install scikit-learn -c constraints.txt")
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)


def indices_of(split: str, digits: np.ndarray) -> np.ndarray:
    """Positions of the samples of a split: the same tenths of every class."""
    by_class = np.argsort(digits, kind="stable")
    return np.sort(by_class[np.isin(np.arange(len(digits)) % 10, TENTHS[split])])
