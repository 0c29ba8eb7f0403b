"""Compare a step with that of a hand-written loop, on the CPU: python benchmarks/steps.py [--out results.json]

The programs take turns. The project's has all on: TensorBoard, progress bar, throughput, checkpoints, clipping.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_project import Command, make_project, plain_command, project_command, rank_commands
from result_rows import make_row, print_and_save
from turns import Program, measure_turns

TURNS = 15
TINY = ["model=tiny", "data=tiny", "trainer.log_every_n_steps=50"]
TWO_RANKS = ["strategy=ddp", "trainer.devices=2"]
# Two sequences for each of two ranks: a step takes 40 ms on a fast machine and 100 ms on a slow one.
GPT = {"layers": 4, "heads": 4, "width": 256, "vocab": 256, "block": 128, "batch": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = make_project(folder)
        rows = [*measure_tiny(project, folder), *measure_two_ranks(project, folder), *measure_compiled(project, folder)]
        print_and_save(rows, arguments.out)


def measure_tiny(project: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure the overhead of a step, with a network that costs almost nothing."""
    programs: dict[str, Sequence[Command]] = {
        "plain": [plain_command("plain_tiny.py")],
        "bare": [plain_command("stock_trainer.py", "bare")],
        "stock": [plain_command("stock_trainer.py")],
        "ours": [project_command(project, folder / "calls", *TINY)],
    }
    calls = measure_turns(programs, folder, steps=300, turns=3, meter="calls", warm_up=100)
    programs["ours"] = [project_command(project, folder / "processor", *TINY)]
    seconds = measure_turns(programs, folder, steps=400, turns=TURNS, meter="processor", warm_up=100)
    added = [
        (ours - plain) / (stock - plain)
        for ours, plain, stock in zip(seconds["ours"], seconds["plain"], seconds["stock"], strict=True)
    ]
    return [
        make_row("function calls per step, everything on", calls["ours"], "", 2500),
        make_row("function calls per step, stock Trainer with usual callbacks", calls["stock"], ""),
        make_row("function calls per step, bare Trainer", calls["bare"], ""),
        make_row("function calls per step, hand-written loop", calls["plain"], ""),
        make_row("CPU time added to the hand-written loop's step, over what a stock Trainer adds", added, "x", 0.6),
        *(make_row(f"CPU time of a step: {name}", [1e6 * value for value in seconds[name]], "us") for name in programs),
    ]


def measure_two_ranks(project: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure DDP over gloo. Each program starts three times, as the layout of its memory differs between processes."""
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for number in range(3):
        programs = two_rank_programs(project, folder, f"ddp-{number}")
        for name, figures in measure_turns(programs, folder, steps=8, turns=9, warm_up=20).items():
            seconds[name] += figures
    ratios = [ours / plain for ours, plain in zip(seconds["ours"], seconds["plain"], strict=True)]
    programs = two_rank_programs(project, folder, "collectives")
    counts = measure_turns(programs, folder, steps=40, turns=3, meter="collectives", warm_up=30)
    extra = [ours - plain for ours, plain in zip(counts["ours"], counts["plain"], strict=True)]
    return [
        make_row("step of DDP, 2 ranks, over the hand-written loop's", ratios, "x", 1.03),
        make_row("step of DDP, 2 ranks", [1e3 * value for value in seconds["ours"]], "ms"),
        # Other steps have more: ranks agree about once a second, and every 50 steps they reduce a point of the curves.
        make_row("collectives of a typical step more than of the hand-written loop's, 2 ranks", extra, "", 0),
    ]


def two_rank_programs(project: Path, folder: Path, name: str) -> dict[str, Sequence[Command]]:
    """Return the commands of the ranks of the hand-written loop and of the project."""
    ours = gpt_command(project, folder, name, *TWO_RANKS)
    return {"plain": rank_commands(plain_gpt_command(folder), 2), "ours": rank_commands(ours, 2)}


def gpt_command(project: Path, folder: Path, name: str, *words: str) -> Command:
    """Return the command that trains the small GPT with the project."""
    sizes = {"num_layers": "layers", "num_heads": "heads", "width": "width"}
    return project_command(
        project, folder / name, *words, "model=gpt_tiny", "data=text",
        f"data.files={tokens(folder)}", f"data.vocab_size={GPT['vocab']}", f"data.block_size={GPT['block']}",
        f"data.global_batch_size={GPT['batch']}", "data.bytes_per_token=1.0", "trainer.log_every_n_steps=50",
        *(f"model.network.{key}={GPT[size]}" for key, size in sizes.items()),
    )  # fmt: skip


def plain_gpt_command(folder: Path) -> Command:
    """Return the command that trains the same GPT in a hand-written loop."""
    return plain_command("plain_gpt.py", str(tokens(folder)), *(f"--{key}={value}" for key, value in GPT.items()))


def tokens(folder: Path) -> Path:
    """Return a file of two million random tokens."""
    file = folder / "tokens.bin"
    if not file.exists():
        np.random.default_rng(0).integers(0, GPT["vocab"], 2 * 10**6, dtype=np.uint16).tofile(file)
    return file


def measure_compiled(project: Path, folder: Path) -> list[dict[str, Any]]:
    """Measure the first step with torch.compile: of a first run, of a second one on its node, and on another node."""
    same, other, first_runs = [], [], []
    for number in range(2):
        first, *seconds = (
            first_step_seconds(
                project, folder, name=f"{name}-{number}", node=f"{node}-{number}", cache=f"cache-{number}"
            )
            for name, node in (("first", "node1"), ("same", "node1"), ("other", "node2"))
        )
        first_runs.append(first)
        for ratios, value in zip((same, other), seconds, strict=True):
            ratios.append(value / first)
    return [
        make_row("first step with torch.compile, of a second run on a node over the first run's", same, "x", 0.15),
        make_row("the same on another node, where C++ is compiled again (none on GPUs)", other, "x"),
        make_row("first step with torch.compile, first run", first_runs, "s"),
    ]


def first_step_seconds(project: Path, folder: Path, *, name: str, node: str, cache: str) -> float:
    """Return the seconds of the first step.

    Args:
        node: the name of the node's own storage.
        cache: the name of the folder that all nodes see.
    """
    folders = {"folder": folder / cache, "node_local": folder / node}
    folders["node_local"].mkdir(exist_ok=True)
    words = [f"callbacks.compile_cache.{key}={path}" for key, path in folders.items()]
    words += ["strategy.compile=true", "trainer.max_steps=2"]
    command, environ = gpt_command(project, folder, name, *words)
    settings = {"TURN_STEPS": "1", "TURN_WARM_UP": "0", "TURN_METER": "seconds"}
    program = Program([(command, {**environ, **settings})], folder, folder / f"{name}.log")
    program.read_figure()
    seconds = program.run_turn()
    program.end(finish=True)
    return seconds


if __name__ == "__main__":
    main()
