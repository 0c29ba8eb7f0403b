"""Measure data loading: python benchmarks/loading.py [--folder DIR] [--node-local DIR] [--out results.json]

First, the batches of training: the project's data module, sampler and loader on files made by tools/pack.py, compared
with numpy's fancy indexing of the same arrays in RAM, in a precomputed order and in one thread. Both alternate, and the
files are in the page cache. Then the same photos as a folder of JPEG files, packed, and staged, in --folder: the first
epoch reads from the file system, if that drops a file's pages on request.

The photos are crops of the two in scikit-learn. The text is Python's standard library and its tests, tokenized by a BPE
that is trained on it.
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
from bench_project import use_project
from cookiecutter.main import cookiecutter
from result_rows import make_row, print_and_save
from tokenizers import ByteLevelBPETokenizer

TEMPLATE = Path(__file__).resolve().parents[1]
NUM_PHOTOS, PIXELS = 4800, 256
ROUNDS, TURN_SECONDS = 41, 0.1  # about; turns are short, so that both programs see the same load of the machine
BLOCK, BATCH_TOKENS = 1024, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    temporary = Path(tempfile.gettempdir())
    parser.add_argument("--folder", type=Path, default=temporary, help="on the file system that is measured")
    parser.add_argument("--node-local", type=Path, default=temporary, help="storage of this node, for staging")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as made,
        tempfile.TemporaryDirectory(dir=arguments.node_local) as own,
    ):
        folder = Path(made)
        project = cookiecutter(str(TEMPLATE), no_input=True, default_config=True, output_dir=made)
        use_project(Path(project))
        make_photos(folder / "photos")
        rows = []
        for size, batch in ((64, 128), (224, 64)):
            pack(project, f"data.dir={folder}/photos", f"data.image_size={size}", f"out={folder}/{size}.npy")
            rows += measure_images(str(folder / f"{size}.npy"), batch)
        sources, tokenizer = list_sources(), ByteLevelBPETokenizer()
        tokenizer.train(sources, vocab_size=4096, special_tokens=["<|endoftext|>"], show_progress=False)
        tokenizer.save(f"{folder}/tokenizer.json")
        words = [f"data.files={json.dumps(sources)}", f"tokenizer={folder}/tokenizer.json"]
        pack(project, *words, f"out={folder}/text.npy")
        rows += measure_tokens(str(folder / "text.npy"))
        rows += measure_storage(folder, str(folder / "224.npy"), node_local=own)
    print_and_save(rows, arguments.out)


def make_photos(folder: Path) -> None:
    """Write JPEG files in two class folders: random crops of two real photos."""
    from PIL import Image

    package = folder.with_name("scikit-learn")  # installed for its photos only
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package)]
    subprocess.run([*install, "scikit-learn==1.9.1"], check=True)
    random = np.random.default_rng(0)
    for name in ("china", "flower"):
        (folder / name).mkdir(parents=True)
        whole = Image.open(package / f"sklearn/datasets/images/{name}.jpg")
        for i in range(NUM_PHOTOS // 2):
            side = int(random.integers(100, min(whole.size)))
            left, top = (int(random.integers(0, length - side + 1)) for length in whole.size)
            part = whole.resize((PIXELS, PIXELS), box=(left, top, left + side, top + side))
            part.save(folder / name / f"{i}.jpg", quality=90)


def list_sources() -> list[str]:
    """Return the files of the standard library and its tests, without those that deliberately are not UTF-8."""
    files = []
    for file in Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"):
        if "site-packages" not in file.parts:
            with suppress(UnicodeDecodeError):
                file.read_text(encoding="utf-8")
                files.append(str(file))
    return files


def pack(project: str, *words: str) -> None:
    subprocess.run([sys.executable, f"{project}/tools/pack.py", *words], check=True, stdout=subprocess.DEVNULL)


def measure_images(file: str, batch: int) -> list[dict[str, Any]]:
    """Compare the loader of packed images with fancy indexing of the same array in RAM."""
    from my_research.data.packed import PackedImages

    data = PackedImages(file, global_batch_size=batch)
    packed, (first, end) = data.packed, data.packed.splits["train"]
    ram = np.load(file)[first:end]
    labels = packed.labels[first:end]

    order = shuffle_batches(len(ram), batch)

    def numpy_batches() -> Iterator[Any]:
        for rows in order:
            yield ram[rows], labels[rows]

    name = f"packed images, {packed.image_size} x {packed.image_size}, batches of {batch}"
    return compare(name, data, numpy_batches, batch_units=batch, unit="images/s")


def measure_tokens(file: str) -> list[dict[str, Any]]:
    """Compare the same for packed tokens: windows, as inputs and targets."""
    from my_research.data.text import Text

    data = Text(file, block_size=BLOCK, global_batch_size=BATCH_TOKENS)
    ram = np.load(file)
    windows = np.lib.stride_tricks.sliding_window_view(ram, BLOCK + 1)
    order = shuffle_batches(len(data.dataset("train")), BATCH_TOKENS)  # type: ignore[arg-type]

    def numpy_batches() -> Iterator[Any]:
        for rows in order:
            batch = windows[rows * BLOCK]
            yield batch[:, :-1].astype(np.int64), batch[:, 1:].astype(np.int64)

    name = f"packed tokens ({ram.dtype}), windows of {BLOCK}, batches of {BATCH_TOKENS}"
    return compare(name, data, numpy_batches, batch_units=BATCH_TOKENS * BLOCK, unit="tokens/s")


def shuffle_batches(num_samples: int, batch: int) -> list[np.ndarray]:
    """Return batches of random indices."""
    order = np.random.default_rng(1).permutation(num_samples)
    return [order[start : start + batch] for start in range(0, num_samples - batch + 1, batch)]


def compare(
    name: str, data: Any, numpy_batches: Callable[[], Any], *, batch_units: int, unit: str
) -> list[dict[str, Any]]:
    """Return rows with the loader's rate relative to numpy's, and with each rate."""
    loader = data.train_dataloader()
    loader_rates, numpy_rates = [], []
    for batches in (lambda: loader, numpy_batches):
        measure_rate(batches, batch_units)  # maps the pages
    for _ in range(ROUNDS):
        loader_rates.append(measure_rate(lambda: loader, batch_units))
        numpy_rates.append(measure_rate(numpy_batches, batch_units))
    ratios = [ours / numpys for ours, numpys in zip(loader_rates, numpy_rates, strict=True)]
    return [
        make_row(f"{name}: loader over numpy from RAM", ratios, "x", 0.75, "higher"),
        make_row(f"{name}: loader", loader_rates, unit, better="higher"),
        make_row(f"{name}: numpy from RAM", numpy_rates, unit, better="higher"),
    ]


def measure_rate(batches: Callable[[], Any], batch_units: int) -> float:
    """Return the units per second over whole epochs, for about TURN_SECONDS."""
    num_units, start_time = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start_time) < TURN_SECONDS:
        for _ in batches():
            num_units += batch_units
    return num_units / seconds


def measure_storage(folder: Path, packed: str, *, node_local: str) -> list[dict[str, Any]]:
    """Measure the first and later epochs of the same photos as files, packed, and staged."""
    from my_research.data.images import Images
    from my_research.data.packed import PackedImages

    staged = PackedImages(packed, global_batch_size=64, stage=True, node_local=node_local)
    start_time = time.perf_counter()
    staged.prepare_data()
    rows = [make_row("the packed file is staged in", [time.perf_counter() - start_time], "s")]
    kinds = {
        "a folder of JPEG files": Images(str(folder / "photos"), global_batch_size=64, num_workers=None),
        "packed": PackedImages(packed, global_batch_size=64),
        "packed and staged": staged,
    }
    cold: dict[str, list[float]] = {name: [] for name in kinds}
    warm: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(3):
        for name, data in kinds.items():
            drop_from_page_cache(folder)
            drop_from_page_cache(Path(node_local))
            loader = data.train_dataloader()
            cold[name].append(epoch_rate(loader))
            warm[name].append(epoch_rate(loader))
            del loader  # and end its workers
    for name in kinds:
        rows += [make_row(f"photos of 224 x 224, {name}: first epoch", cold[name], "images/s", better="higher")]
        rows += [make_row(f"photos of 224 x 224, {name}: later epochs", warm[name], "images/s", better="higher")]
    return rows


def epoch_rate(loader: Any) -> float:
    """Return the images per second of an epoch."""
    start_time, num_images = time.perf_counter(), 0
    for images, *_ in loader:
        num_images += len(images)
    return num_images / (time.perf_counter() - start_time)


def drop_from_page_cache(folder: Path) -> None:
    """Drop the files of a folder from this node's memory (POSIX_FADV_DONTNEED)."""
    from hpc.packed import packed_images

    packed_images.map_pixels.cache_clear()  # pages that are mapped are not dropped
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
