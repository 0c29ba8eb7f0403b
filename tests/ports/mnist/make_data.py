"""Write a small stand-in for Keras' mnist.npz: ten classes of smooth 28x28 images under noise."""

import sys
from pathlib import Path

import numpy as np


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(1)
    prototypes = np.kron(rng.uniform(0, 200, (10, 7, 7)), np.ones((4, 4)))

    def draw(count):
        labels = rng.integers(0, 10, count)
        images = prototypes[labels] + rng.normal(0, 40, (count, 28, 28))
        return images.clip(0, 255).astype(np.uint8), labels.astype(np.uint8)

    x_train, y_train = draw(720)
    x_test, y_test = draw(120)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
