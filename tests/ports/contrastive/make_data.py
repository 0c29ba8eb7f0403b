"""Write train_images.npy, train_labels.npy and the same of val: 24x24 textures of four kinds."""

import sys
from pathlib import Path

import numpy as np

SIZE = 24


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(7)
    folder.mkdir(parents=True, exist_ok=True)
    y, x = np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij")
    waves = np.array([[0.6, 0.0], [0.0, 0.6], [1.3, 0.0], [0.0, 1.3]])
    for split, count in (("train", 480), ("val", 96)):
        labels = rng.integers(0, 4, count)
        ky, kx = waves[labels].T[:, :, None, None]
        phase = rng.uniform(0, 2 * np.pi, (count, 1, 1))
        pattern = 0.5 + 0.5 * np.sin(ky * y + kx * x + phase)
        colours = rng.uniform(0.3, 1, (count, 3, 1, 1))
        images = 200 * colours * pattern[:, None] + rng.normal(0, 40, (count, 3, SIZE, SIZE))
        np.save(folder / f"{split}_images.npy", images.clip(0, 255).astype(np.uint8))
        np.save(folder / f"{split}_labels.npy", labels)


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
