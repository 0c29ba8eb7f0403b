"""Measure the gain of each fast default, as a step with it over one without: python benchmarks/fast_defaults.py

On a machine without a GPU small networks are trained, and defaults that need a GPU are left out.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_project import make_project, project_command, rank_commands
from result_rows import make_row, print_and_save
from steps import tokens
from table import WORTH
from turns import measure_turns

GPU = torch.cuda.is_available()
ON = "trainer=gpu" if GPU else "trainer=cpu"
CNN = [ON, "model=resnet18", "data=constant", f"data.global_batch_size={256 if GPU else 8}"]
CNN += [] if GPU else ["data.image_size=64"]
GPT = [ON, "model=gpt_tiny", "data=text", "data.files={tokens}", "data.vocab_size=256", "data.bytes_per_token=1.0"]
GPT += ["data.global_batch_size=32"] if GPU else ["data.global_batch_size=2", "data.block_size=128"]
DDP = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]


@dataclass(frozen=True)
class FastDefault:
    """A default that makes training faster, and the overrides that turn it on and off."""

    name: str
    words: list[str]
    on: list[str]
    off: list[str]
    num_ranks: int = 1
    needs_gpu: bool = False


FAST_DEFAULTS = [
    FastDefault("fused optimizer", GPT, ["model.optimizer.fused=true"], ["model.optimizer.fused=false"]),
    FastDefault("torch.compile, GPT", GPT, ["strategy.compile=true"], ["strategy.compile=false"]),
    FastDefault("torch.compile, ResNet", CNN, ["strategy.compile=true"], ["strategy.compile=false"], needs_gpu=True),
    FastDefault("channels last", CNN, ["strategy.channels_last=true"], ["strategy.channels_last=false"]),
    FastDefault(
        "vocabulary of 50257 rounded up to 50304",
        [*GPT, "data.vocab_size=50257", f"data.global_batch_size={8 if GPU else 2}"],
        [],
        ["model.network.vocab_multiple=1"],
    ),
    FastDefault(
        "gradients summed where they lie (2 ranks)",
        [*GPT, *DDP],
        [],
        ["strategy.lightning.gradient_as_bucket_view=false"],
        num_ranks=2,
    ),
    FastDefault(
        "static graph (2 ranks; off by default)", [*GPT, *DDP], ["+strategy.lightning.static_graph=true"], [], 2
    ),
    FastDefault("TF32 in fp32", [*CNN, "trainer.precision=32-true"], [], ["matmul_precision=highest"], needs_gpu=True),
    FastDefault("batches fetched ahead", CNN, [], ["+data.num_ahead=0"], needs_gpu=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, help="a project made by benchmarks/bench_project.py; default: make one")
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = (arguments.project or make_project(folder)).resolve()
        chosen = [default for default in FAST_DEFAULTS if can_run(default)]
        rows = [measure(default, number, project=project, folder=folder) for number, default in enumerate(chosen)]
        print_and_save(rows, arguments.out)


def can_run(default: FastDefault) -> bool:
    """Return whether this machine can run it: several ranks need a machine without a GPU, as there is only one GPU."""
    return default.needs_gpu <= GPU and not (GPU and default.num_ranks > 1)


def measure(default: FastDefault, number: int, *, project: Path, folder: Path) -> dict[str, Any]:
    """Return the row of a default: the ratio of step times, with it over without."""

    def rank_programs(name: str, words: Sequence[str]) -> list:
        overrides = [word.format(tokens=tokens(folder)) for word in (*default.words, *words)]
        # The last override of a key counts; Hydra would reject two.
        unique = list({word.partition("=")[0]: word for word in overrides}.values())
        cache = f"callbacks.compile_cache.folder={folder / 'cache'}"
        command = project_command(project, folder / f"{name}-{number}", *unique, cache)
        return rank_commands(command, default.num_ranks) if default.num_ranks > 1 else [command]

    programs = {"on": rank_programs("on", default.on), "off": rank_programs("off", default.off)}
    seconds = measure_turns(programs, folder, steps=4, turns=9, warm_up=5)
    ratios = [on / off for on, off in zip(seconds["on"], seconds["off"], strict=True)]
    return make_row(default.name + WORTH, ratios, "x")


if __name__ == "__main__":
    main()
