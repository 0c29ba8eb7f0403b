"""Write train.pkl, val.pkl and test.pkl: lists of (series of shape (length, 2), label). Class 2 is rare."""

import pickle
import sys
from pathlib import Path

import numpy as np


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(9)
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 400), ("val", 80), ("test", 80)):
        samples = []
        for _ in range(count):
            label = int(rng.choice(3, p=[0.6, 0.3, 0.1]))
            time = np.arange(rng.integers(8, 60))
            phase = (0.2, 0.6, 1.2)[label] * time + rng.uniform(0, 2 * np.pi)
            series = np.stack([np.sin(phase), np.cos(phase)], axis=1) + rng.normal(0, 0.2, (len(time), 2))
            samples.append((series.astype(np.float32), label))
        with open(folder / f"{split}.pkl", "wb") as file:
            pickle.dump(samples, file)


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
