"""Write fields.h5: smooth random fields as targets, and the same fields coarsened by block means as inputs."""

import sys
from pathlib import Path

import h5py
import numpy as np

SIZE = 32


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(2)
    y, x = np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij")
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "fields.h5", "w") as file:
        for split, count in (("train", 320), ("valid", 64), ("test", 64)):
            targets = np.zeros((count, 1, SIZE, SIZE), dtype=np.float32)
            for target in targets:
                for _ in range(4):
                    kx, ky = rng.uniform(-0.6, 0.6, 2)
                    target[0] += rng.normal() * np.sin(kx * x + ky * y + rng.uniform(0, 2 * np.pi))
            coarse = targets.reshape(count, 1, SIZE // 4, 4, SIZE // 4, 4).mean(axis=(3, 5))
            group = file.create_group(split)
            group["input"] = np.kron(coarse, np.ones((1, 1, 4, 4), dtype=np.float32))
            group["target"] = targets


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
