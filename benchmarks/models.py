"""GPT and ResNet-50 over hand-written loops, on one GPU: python benchmarks/models.py [--project DIR] [--out FILE]

Installs nothing. On a machine without a GPU the same programs train small networks, to see that all of it runs; FILE
stays as it is.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fork import Command, fork, ours, plain
from rows import report, row
from turns import taken

GPU = torch.cuda.is_available()
TURNS, STEPS, WARM_UP = (9, 10, 20) if GPU else (3, 2, 3)
GOALS = {"124M": (1.01, 45.0), "1.3B": (None, 50.0)}  # step over the hand-written loop's, MFU in percent
# layers, heads, width, vocabulary, block, sequences per step: of a GPU that holds two such programs at a time
GPTS = {"124M": (12, 12, 768, 50304, 1024, 32), "1.3B": (24, 32, 2048, 50304, 1024, 16)}
IMAGES = {"batch": 256, "size": 224, "files": 4096}  # three programs at a time
if not GPU:
    GPTS, IMAGES = {"tiny": (2, 2, 64, 256, 64, 8)}, {"batch": 8, "size": 32, "files": 64}
ON = ["trainer=gpu" if GPU else "trainer=cpu", "trainer.log_every_n_steps=10"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, help="one that benchmarks/fork.py has made; otherwise it is made here")
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = (asked.project or fork(folder)).resolve()
        rows = [one for size in GPTS for one in gpt(size, project, folder)] + resnet(project, folder)
        if not GPU:  # it all runs; the figures say nothing
            rows, asked.out = [{**one, "goal": None} for one in rows], None
        report(rows, asked.out)


def gpt(size: str, project: Path, folder: Path) -> list[dict[str, Any]]:
    layers, heads, width, vocab, block, batch = GPTS[size]
    file = folder / f"{vocab}.bin"
    if not file.exists():
        np.random.default_rng(0).integers(0, vocab, 2**24 if GPU else 2**16, dtype=np.uint16).tofile(file)
    slower, least = GOALS.get(size, (None, None))
    sizes = {"layers": layers, "heads": heads, "width": width, "vocab": vocab, "block": block, "batch": batch}
    network = {"num_layers": layers, "num_heads": heads, "width": width}
    mine = ours(
        project, folder / f"gpt-{size}", *ON, "model=gpt_124m", "data=text", f"data.files={file}",
        f"data.vocab_size={vocab}", f"data.block_size={block}", f"data.global_batch_size={batch}",
        "data.bytes_per_token=4.4", *(f"model.network.{key}={value}" for key, value in network.items()), threads=2,
    )  # fmt: skip
    words = [str(file), *(f"--{key}={value}" for key, value in sizes.items()), *(["--compile"] if GPU else [])]
    programs = {"plain": [plain("plain_gpt.py", *words, threads=2)], "ours": [mine]}
    took = taken(programs, folder, steps=STEPS, turns=TURNS, warm_up=WARM_UP)
    # As PaLM counts (Chowdhery et al., 2022, appendix B).
    weights = 12 * layers * width**2 + vocab * width
    flops = batch * block * (6 * weights + 12 * layers * width * block)
    return [
        row(f"GPT {size}: step over the hand-written loop's", ratios(took["ours"], took["plain"]), "x", slower),
        row(f"GPT {size}: step", [1e3 * value for value in took["ours"]], "ms"),
        row(f"GPT {size}: tokens per second", [batch * block / value for value in took["ours"]], "", None, "higher"),
        *utilisation(f"GPT {size}: MFU", flops, took["ours"], least, project),
    ]


def resnet(project: Path, folder: Path) -> list[dict[str, Any]]:
    batch, size = IMAGES["batch"], IMAGES["size"]
    words = [f"--batch={batch}", f"--size={size}", *(["--compile"] if GPU else [])]
    net = [*ON, "model=resnet50", "model.network.norm=batch", f"data.global_batch_size={batch}"]
    constant = ["data=constant", f"data.image_size={size}"]
    packed = ["data=packed", f"data.file={pack(project, folder)}", "model.network.num_classes=1000"]
    programs: dict[str, Sequence[Command]] = {
        "plain": [plain("plain_resnet.py", *words, threads=2)],
        "constant": [ours(project, folder / "constant", *net, *constant, threads=2)],
        "packed": [ours(project, folder / "packed", *net, *packed, threads=2)],
    }
    took = taken(programs, folder, steps=STEPS, turns=TURNS, warm_up=WARM_UP)
    per_second = [batch / value for value in took["constant"]]
    return [
        row("ResNet-50: step over the hand-written loop's", ratios(took["constant"], took["plain"]), "x", 1.01),
        row("ResNet-50: images per second", per_second, "", 4500, "higher"),
        row("ResNet-50: packed data over constant", ratios(took["constant"], took["packed"]), "x", 0.95, "higher"),
    ]


def pack(project: Path, folder: Path) -> Path:
    """JPEG files of the size of photographs, packed by the project's own tool."""
    from PIL import Image

    generator, size = np.random.default_rng(0), IMAGES["size"]
    for number in range(IMAGES["files"]):
        file = folder / "photographs" / f"class{number % 10}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((size * 5 // 4, size * 5 // 4)).save(file, quality=85)
    words = [f"data.dir={folder / 'photographs'}", f"out={folder / 'images.h5'}", f"data.image_size={size}"]
    subprocess.run([sys.executable, str(project / "tools/pack.py"), *words], check=True, stdout=subprocess.DEVNULL)
    return folder / "images.h5"


def utilisation(
    name: str, flops: float, seconds: Sequence[float], goal: float | None, project: Path
) -> list[dict[str, Any]]:
    """MFU in percent; nothing where the device's peak is not known."""
    sys.path.insert(0, str(project / "src"))
    from hpc.jobs.hardware import peak_flops

    best = peak_flops(torch.cuda.get_device_name(), "bf16-mixed") if GPU else None
    return [row(name, [100 * flops / value / best for value in seconds], "%", goal, "higher")] if best else []


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


if __name__ == "__main__":
    main()
