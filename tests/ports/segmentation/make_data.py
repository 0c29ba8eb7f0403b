"""Write images/*.png, masks/*.png and the lists train.txt, val.txt and test.txt: squares, and a few rare discs."""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 32
COLOURS = np.array([[60, 80, 60], [150, 90, 60], [70, 90, 170]])


def make_data(folder: Path) -> None:
    rng = np.random.default_rng(6)
    y, x = np.meshgrid(np.arange(SIZE), np.arange(SIZE), indexing="ij")
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    number = 0
    for split, count in (("train", 320), ("val", 64), ("test", 64)):
        names = []
        for _ in range(count):
            mask = np.zeros((SIZE, SIZE), dtype=np.uint8)
            top, left = rng.integers(0, SIZE - 12, 2)
            mask[top : top + 12, left : left + 12] = 1
            if rng.random() < 0.2:
                centre = rng.integers(8, SIZE - 8, 2)
                mask[(y - centre[0]) ** 2 + (x - centre[1]) ** 2 < 36] = 2
            image = (COLOURS[mask] + rng.normal(0, 30, (SIZE, SIZE, 3))).clip(0, 255).astype(np.uint8)
            names.append(f"{number:05d}.png")
            Image.fromarray(image).save(folder / "images" / names[-1])
            Image.fromarray(mask).save(folder / "masks" / names[-1])
            number += 1
        (folder / f"{split}.txt").write_text("\n".join(names) + "\n")


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
