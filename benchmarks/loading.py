"""How fast data come: python benchmarks/loading.py [--folder DIR] [--node-local DIR] [--out results.json]

What training sees, batch for batch: the project's data module, sampler and loader over files that tools/pack.py made,
against numpy's fancy indexing of the same arrays in RAM with an order that is there already, in one thread. Both take
turns, and the files are in the page cache. Then the same photos from a folder of JPEG files, packed, and staged, in
--folder: there the first epoch reads from the file system, where that lets go of a file's pages when asked to.

The photos are crops of the two that scikit-learn brings along; the text is Python's standard library and its tests,
by a BPE that is trained on it.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from cookiecutter.main import cookiecutter
from rows import report, row

TEMPLATE = Path(__file__).resolve().parents[1]
PHOTOS, PIXELS = 4800, 256
ROUNDS, SECONDS = 41, 0.1  # turns of each, and about how long one lasts: short, so that both see the same machine
BLOCK, BATCH_TOKENS = 1024, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    temporary = Path(tempfile.gettempdir())
    parser.add_argument("--folder", type=Path, default=temporary, help="on the file system that is measured")
    parser.add_argument("--node-local", type=Path, default=temporary, help="storage of this node, for staging")
    asked = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=asked.folder) as made,
        tempfile.TemporaryDirectory(dir=asked.node_local) as own,
    ):
        folder = Path(made)
        project = cookiecutter(str(TEMPLATE), no_input=True, default_config=True, output_dir=made)
        sys.path.insert(0, f"{project}/src")
        make_photos(folder / "photos")
        rows = []
        for size, batch in ((64, 128), (224, 64)):
            pack(project, f"data.dir={folder}/photos", f"data.image_size={size}", f"out={folder}/{size}.h5")
            rows += images(str(folder / f"{size}.h5"), batch)
        text = json.dumps(sources())
        pack(project, f"data.files={text}", "tokenizer=bpe", "data.vocab_size=4096", f"out={folder}/text.npy")
        rows += tokens(str(folder / "text.npy"))
        rows += places(folder, str(folder / "224.h5"), own)
    report(rows, asked.out)


def make_photos(folder: Path) -> None:
    """JPEG files in two class folders: parts of two real photos, each at its own place and scale."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir(parents=True)
        whole = Image.fromarray(photo)
        for i in range(PHOTOS // 2):
            side = int(random.integers(100, min(whole.size)))
            left, top = (int(random.integers(0, length - side + 1)) for length in whole.size)
            part = whole.resize((PIXELS, PIXELS), box=(left, top, left + side, top + side))
            part.save(folder / name / f"{i}.jpg", quality=90)


def sources() -> list[str]:
    """The files of the standard library and its tests, but for some of these that are no UTF-8 on purpose."""
    found = []
    for file in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"):
        if "site-packages" not in file.parts:
            with suppress(UnicodeDecodeError):
                file.read_text(encoding="utf-8")
                found.append(str(file))
    return found


def pack(project: str, *words: str) -> None:
    subprocess.run([sys.executable, f"{project}/tools/pack.py", *words], check=True, stdout=subprocess.DEVNULL)


def images(file: str, batch: int) -> list[dict[str, Any]]:
    """Packed images through the loader, over fancy indexing of the same array in RAM."""
    from my_research.data.packed import PackedImages

    data = PackedImages(file, global_batch_size=batch)
    found, (first, end) = data.packed, data.packed.splits["train"]
    shape = (len(found.labels), 3, found.image_size, found.image_size)
    ram = np.fromfile(file, np.uint8, np.prod(shape), offset=found.offset).reshape(shape)[first:end]
    labels = found.labels[first:end]

    order = orders(len(ram), batch)

    def floor() -> Iterator[Any]:
        for rows in order:
            yield ram[rows], labels[rows]

    name = f"packed images, {found.image_size} x {found.image_size}, batches of {batch}"
    return compared(name, data, floor, batch, "images/s")


def tokens(file: str) -> list[dict[str, Any]]:
    """The same for packed tokens: windows, as inputs and targets."""
    from my_research.data.text import Text

    data = Text(file, block_size=BLOCK, global_batch_size=BATCH_TOKENS)
    ram = np.load(file)
    num, every = len(data.dataset("train")), np.lib.stride_tricks.sliding_window_view(ram, BLOCK + 1)

    order = orders(num, BATCH_TOKENS)

    def floor() -> Iterator[Any]:
        for rows in order:
            read = every[rows * BLOCK]
            yield read[:, :-1].astype(np.int64), read[:, 1:].astype(np.int64)

    name = f"packed tokens ({ram.dtype}), windows of {BLOCK}, batches of {BATCH_TOKENS}"
    return compared(name, data, floor, BATCH_TOKENS * BLOCK, "tokens/s")


def orders(num: int, batch: int) -> list[np.ndarray]:
    """Batches of random indices."""
    order = np.random.default_rng(1).permutation(num)
    return [order[start : start + batch] for start in range(0, num - batch + 1, batch)]


def compared(name: str, data: Any, floor: Callable[[], Any], size: int, unit: str) -> list[dict[str, Any]]:
    """The loader's rate over the floor's, and each by itself; a batch is `size` units."""
    loader = data.train_dataloader()
    ours, theirs = [], []
    for batches in (lambda: loader, floor):
        rate(batches, size)  # maps the pages
    for _ in range(ROUNDS):
        ours.append(rate(lambda: loader, size))
        theirs.append(rate(floor, size))
    over = [ours / theirs for ours, theirs in zip(ours, theirs, strict=True)]
    return [
        row(f"{name}: loader over numpy from RAM", over, "x", 0.75, "higher"),
        row(f"{name}: loader", ours, unit, better="higher"),
        row(f"{name}: numpy from RAM", theirs, unit, better="higher"),
    ]


def rate(batches: Callable[[], Any], size: int) -> float:
    """Units per second, over whole epochs, about SECONDS in all."""
    done, began = 0, time.perf_counter()
    while (lasted := time.perf_counter() - began) < SECONDS:
        for _ in batches():
            done += size
    return done / lasted


def places(folder: Path, packed: str, node_local: str) -> list[dict[str, Any]]:
    """Epochs of the same photos from files, packed and staged: the first, from the file system, and later ones."""
    from my_research.data.images import Images
    from my_research.data.packed import PackedImages

    staged = PackedImages(packed, global_batch_size=64, stage=True, node_local=node_local)
    began = time.perf_counter()
    staged.prepare_data()
    rows = [row("the packed file is staged in", [time.perf_counter() - began], "s")]
    kinds = {
        "a folder of JPEG files": Images(str(folder / "photos"), global_batch_size=64, num_workers=None),
        "packed": PackedImages(packed, global_batch_size=64),
        "packed and staged": staged,
    }
    cold: dict[str, list[float]] = {name: [] for name in kinds}
    warm: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(3):
        for name, data in kinds.items():
            forget(folder)
            forget(Path(node_local))
            loader = data.train_dataloader()
            cold[name].append(epoch(loader))
            warm[name].append(epoch(loader))
            del loader  # its workers, too
    for name in kinds:
        rows += [row(f"photos of 224 x 224, {name}: first epoch", cold[name], "images/s", better="higher")]
        rows += [row(f"photos of 224 x 224, {name}: later epochs", warm[name], "images/s", better="higher")]
    return rows


def epoch(loader: Any) -> float:
    """Images per second."""
    began, done = time.perf_counter(), 0
    for images, *_ in loader:
        done += len(images)
    return done / (time.perf_counter() - began)


def forget(folder: Path) -> None:
    """Drop the files of a folder from this node's memory (POSIX_FADV_DONTNEED)."""
    from hpc.data import packed_files

    packed_files.pixels.cache_clear()  # mapped pages stay
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
