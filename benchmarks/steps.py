"""What a step costs over a hand-written loop's, on CPU: python benchmarks/steps.py [--out results.json]

The programs take turns; ours has everything on: TensorBoard, progress bar, throughput, checkpoints, clipping.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fork import Command, fork, ours, plain, ranks
from rows import report, row
from turns import Program, taken

TURNS = 15
TINY = ["model=tiny", "data=tiny", "trainer.log_every_n_steps=50"]
TWO = ["strategy=ddp", "trainer.devices=2"]
# Two sequences for each of two ranks: from some 40 ms a step on a fast machine to 100 on a slow one.
GPT = {"layers": 4, "heads": 4, "width": 256, "vocab": 256, "block": 128, "batch": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = fork(folder)
        report([*tiny(project, folder), *two_ranks(project, folder), *compiled(project, folder)], asked.out)


def tiny(project: Path, folder: Path) -> list[dict[str, Any]]:
    """Where the network costs nothing, all that a step costs is what is around it."""
    programs: dict[str, Sequence[Command]] = {
        "plain": [plain("plain_tiny.py")],
        "bare": [plain("stock.py", "bare")],
        "stock": [plain("stock.py")],
        "ours": [ours(project, folder / "calls", *TINY)],
    }
    calls = taken(programs, folder, steps=300, turns=3, meter="calls", warm_up=100)
    programs["ours"] = [ours(project, folder / "processor", *TINY)]
    used = taken(programs, folder, steps=400, turns=TURNS, meter="processor", warm_up=100)
    added = [
        (mine - by_hand) / (theirs - by_hand)
        for mine, by_hand, theirs in zip(used["ours"], used["plain"], used["stock"], strict=True)
    ]
    return [
        row("function calls per step, everything on", calls["ours"], "", 2500),
        row("function calls per step, stock Trainer with usual callbacks", calls["stock"], ""),
        row("function calls per step, bare Trainer", calls["bare"], ""),
        row("function calls per step, hand-written loop", calls["plain"], ""),
        row("CPU time added to the hand-written loop's step, over what a stock Trainer adds", added, "x", 0.6),
        *(row(f"CPU time of a step: {name}", [1e6 * value for value in used[name]], "us") for name in programs),
    ]


def two_ranks(project: Path, folder: Path) -> list[dict[str, Any]]:
    """DDP over gloo. Started three times, since a process keeps for its life how its memory happens to lie."""
    took: dict[str, list[float]] = {"plain": [], "ours": []}
    for number in range(3):
        mine = gpt(project, folder, f"ddp-{number}", *TWO)
        programs = {"plain": ranks(by_hand(folder), 2), "ours": ranks(mine, 2)}
        for name, figures in taken(programs, folder, steps=8, turns=9, warm_up=20).items():
            took[name] += figures
    over = [mine / theirs for mine, theirs in zip(took["ours"], took["plain"], strict=True)]
    programs = {"plain": ranks(by_hand(folder), 2), "ours": ranks(gpt(project, folder, "collectives", *TWO), 2)}
    made = taken(programs, folder, steps=40, turns=3, meter="collectives", warm_up=30)
    extra = [mine - theirs for mine, theirs in zip(made["ours"], made["plain"], strict=True)]
    return [
        row("step of DDP, 2 ranks, over the hand-written loop's", over, "x", 1.03),
        row("step of DDP, 2 ranks", [1e3 * value for value in took["ours"]], "ms"),
        # Not a typical one: about once a second ranks agree, and every 50 steps a point of the curves is made.
        row("collectives of a typical step more than of the hand-written loop's, 2 ranks", extra, "", 0),
    ]


def gpt(project: Path, folder: Path, name: str, *words: str) -> Command:
    sizes = {"num_layers": "layers", "num_heads": "heads", "width": "width"}
    return ours(
        project, folder / name, *words, "model=gpt_tiny", "data=text",
        f"data.files={tokens(folder)}", f"data.vocab_size={GPT['vocab']}", f"data.block_size={GPT['block']}",
        f"data.global_batch_size={GPT['batch']}", "data.bytes_per_token=1.0", "trainer.log_every_n_steps=50",
        *(f"model.network.{key}={GPT[size]}" for key, size in sizes.items()),
    )  # fmt: skip


def by_hand(folder: Path) -> Command:
    return plain("plain_gpt.py", str(tokens(folder)), *(f"--{key}={value}" for key, value in GPT.items()))


def tokens(folder: Path) -> Path:
    """Two million of them, at random."""
    file = folder / "tokens.bin"
    if not file.exists():
        np.random.default_rng(0).integers(0, GPT["vocab"], 2 * 10**6, dtype=np.uint16).tofile(file)
    return file


def compiled(project: Path, folder: Path) -> list[dict[str, Any]]:
    """The first step with torch.compile: of the first run, and of the second one, which finds what that had made."""
    ratios, first = [], []
    for number in range(2):
        cold, warm = (first_step(project, folder, f"{name}-{number}", f"cache-{number}") for name in ("cold", "warm"))
        ratios.append(warm / cold)
        first.append(cold)
    return [
        row("first step with torch.compile, of a second run over the first run's", ratios, "x", 0.15),
        row("first step with torch.compile, first run", first, "s"),
    ]


def first_step(project: Path, folder: Path, name: str, cache: str) -> float:
    """Seconds. What was compiled is kept as a job would find it on another node."""
    places = {"folder": folder / cache, "node_local": folder / f"{name}-node"}
    places["node_local"].mkdir()
    kept = [f"callbacks.compile_cache.{key}={path}" for key, path in places.items()]
    command, environ = gpt(project, folder, name, "strategy.compile=true", "trainer.max_steps=2", *kept)
    settings = {"TURN_STEPS": "1", "TURN_WARM_UP": "0", "TURN_METER": "seconds"}
    program = Program([(command, {**environ, **settings})], folder, folder / f"{name}.log")
    program.answer()
    seconds = program.turn()
    program.end(finish=True)
    return seconds


if __name__ == "__main__":
    main()
