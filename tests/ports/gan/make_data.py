"""Write images.npy: 16x16 grey images, each with one bright round spot."""

import sys
from pathlib import Path

import numpy as np


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(3)
    y, x = np.meshgrid(np.arange(16), np.arange(16), indexing="ij")
    centres = rng.uniform(5, 11, (640, 2, 1, 1))
    images = 255 * np.exp(-((y - centres[:, 0]) ** 2 + (x - centres[:, 1]) ** 2) / 8)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "images.npy", images.astype(np.uint8))


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
