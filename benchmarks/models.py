"""Compare GPT and ResNet-50 with hand-written loops on a GPU: python benchmarks/models.py [--project DIR] [--out FILE]

Installs nothing. On a machine without a GPU the same programs train small networks, to test that they run; FILE does
not change then.
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
from bench_project import Command, make_project, plain_command, project_command, use_project
from result_rows import make_row, print_and_save
from turns import measure_turns

GPU = torch.cuda.is_available()
TURNS, STEPS, WARM_UP = (9, 10, 20) if GPU else (3, 2, 3)
GOALS = {"124M": (1.01, 45.0), "1.3B": (None, 50.0)}  # step over the hand-written loop's, MFU in percent
# Layers, heads, width, vocabulary, block, sequences per step. The GPU holds two such programs at a time.
GPTS = {"124M": (12, 12, 768, 50304, 1024, 32), "1.3B": (24, 32, 2048, 50304, 1024, 16)}
IMAGES = {"batch": 256, "size": 224, "files": 4096}  # three programs at a time
if not GPU:
    GPTS, IMAGES = {"tiny": (2, 2, 64, 256, 64, 8)}, {"batch": 8, "size": 32, "files": 64}
ON = ["trainer=gpu" if GPU else "trainer=cpu", "trainer.log_every_n_steps=10"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, help="a project made by benchmarks/bench_project.py; default: make one")
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = (arguments.project or make_project(folder)).resolve()
        rows = [row for size in GPTS for row in measure_gpt(size, project, folder)] + measure_resnet(project, folder)
        if not GPU:  # these figures mean nothing
            rows, arguments.out = [{**row, "goal": None} for row in rows], None
        print_and_save(rows, arguments.out)


def measure_gpt(size: str, project: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a GPT: step time, tokens per second, and model FLOPs utilization (MFU)."""
    layers, heads, width, vocab, block, batch = GPTS[size]
    file = folder / f"{vocab}.bin"
    if not file.exists():
        np.random.default_rng(0).integers(0, vocab, 2**24 if GPU else 2**16, dtype=np.uint16).tofile(file)
    max_ratio, min_mfu = GOALS.get(size, (None, None))
    sizes = {"layers": layers, "heads": heads, "width": width, "vocab": vocab, "block": block, "batch": batch}
    network = {"num_layers": layers, "num_heads": heads, "width": width}
    command = project_command(
        project, folder / f"gpt-{size}", *ON, "model=gpt_124m", "data=text", f"data.files={file}",
        f"data.vocab_size={vocab}", f"data.block_size={block}", f"data.global_batch_size={batch}",
        "data.bytes_per_token=4.4", *(f"model.network.{key}={value}" for key, value in network.items()), threads=2,
    )  # fmt: skip
    words = [str(file), *(f"--{key}={value}" for key, value in sizes.items()), *(["--compile"] if GPU else [])]
    programs = {"plain": [plain_command("plain_gpt.py", *words, threads=2)], "ours": [command]}
    seconds = measure_turns(programs, folder, steps=STEPS, turns=TURNS, warm_up=WARM_UP)
    # Counted as for PaLM (Chowdhery et al., 2022, appendix B).
    num_weights = 12 * layers * width**2 + vocab * width
    flops = batch * block * (6 * num_weights + 12 * layers * width * block)
    return [
        make_row(
            f"GPT {size}: step over the hand-written loop's", ratios(seconds["ours"], seconds["plain"]), "x", max_ratio
        ),
        make_row(f"GPT {size}: step", [1e3 * value for value in seconds["ours"]], "ms"),
        make_row(
            f"GPT {size}: tokens per second", [batch * block / value for value in seconds["ours"]], "", None, "higher"
        ),
        *utilization_rows(f"GPT {size}: MFU", flops, seconds["ours"], goal=min_mfu, project=project),
    ]


def measure_resnet(project: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ResNet-50: step time, images per second, and the cost of packed data."""
    batch, size = IMAGES["batch"], IMAGES["size"]
    words = [f"--batch={batch}", f"--size={size}", *(["--compile"] if GPU else [])]
    network = [*ON, "model=resnet50", "model.network.norm=batch", f"data.global_batch_size={batch}"]
    constant = ["data=constant", f"data.image_size={size}"]
    packed = ["data=packed", f"data.file={pack_photographs(project, folder)}", "model.network.num_classes=1000"]
    programs: dict[str, Sequence[Command]] = {
        "plain": [plain_command("plain_resnet.py", *words, threads=2)],
        "constant": [project_command(project, folder / "constant", *network, *constant, threads=2)],
        "packed": [project_command(project, folder / "packed", *network, *packed, threads=2)],
    }
    seconds = measure_turns(programs, folder, steps=STEPS, turns=TURNS, warm_up=WARM_UP)
    per_second = [batch / value for value in seconds["constant"]]
    return [
        make_row(
            "ResNet-50: step over the hand-written loop's", ratios(seconds["constant"], seconds["plain"]), "x", 1.01
        ),
        make_row("ResNet-50: images per second", per_second, "", 4500, "higher"),
        make_row(
            "ResNet-50: packed data over constant", ratios(seconds["constant"], seconds["packed"]), "x", 0.95, "higher"
        ),
    ]


def pack_photographs(project: Path, folder: Path) -> Path:
    """Make JPEG files of the size of photographs, pack them with the project's tool, and return the packed file."""
    from PIL import Image

    generator, size = np.random.default_rng(0), IMAGES["size"]
    for number in range(IMAGES["files"]):
        file = folder / "photographs" / f"class{number % 10}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (size // 8, size // 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((size * 5 // 4, size * 5 // 4)).save(file, quality=85)
    words = [f"data.dir={folder / 'photographs'}", f"out={folder / 'images.npy'}", f"data.image_size={size}"]
    subprocess.run([sys.executable, str(project / "tools/pack.py"), *words], check=True, stdout=subprocess.DEVNULL)
    return folder / "images.npy"


def utilization_rows(
    name: str, flops: float, seconds: Sequence[float], *, goal: float | None, project: Path
) -> list[dict[str, Any]]:
    """Return a row with the model FLOPs utilization in percent; no row if the peak of the device is unknown."""
    use_project(project)
    from hpc.jobs.hardware import peak_flops

    peak_flops = peak_flops(torch.cuda.get_device_name(), "bf16-mixed") if GPU else None
    return (
        [make_row(name, [100 * flops / value / peak_flops for value in seconds], "%", goal, "higher")]
        if peak_flops
        else []
    )


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


if __name__ == "__main__":
    main()
