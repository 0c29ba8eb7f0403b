"""What each fast default is worth, a step with it over one without: python benchmarks/knobs.py

On a machine without a GPU small networks are trained, and what only a GPU has is left out.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fork import fork, ours, ranks
from rows import report, row
from steps import tokens
from table import WORTH
from turns import taken

GPU = torch.cuda.is_available()
ON = "trainer=gpu" if GPU else "trainer=cpu"
CNN = [ON, "model=resnet18", "data=constant", f"data.global_batch_size={256 if GPU else 8}"]
CNN += [] if GPU else ["data.image_size=64"]
GPT = [ON, "model=gpt_tiny", "data=text", "data.files={tokens}", "data.vocab_size=256", "data.bytes_per_token=1.0"]
GPT += ["data.global_batch_size=32"] if GPU else ["data.global_batch_size=2", "data.block_size=128"]
DDP = ["strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu"]


@dataclass(frozen=True)
class Knob:
    name: str
    words: list[str]
    on: list[str]
    off: list[str]
    num_ranks: int = 1
    needs_gpu: bool = False


KNOBS = [
    Knob("fused optimizer", GPT, ["model.optimizer.fused=true"], ["model.optimizer.fused=false"]),
    Knob("torch.compile, GPT", GPT, ["strategy.compile=true"], ["strategy.compile=false"]),
    Knob("torch.compile, ResNet", CNN, ["strategy.compile=true"], ["strategy.compile=false"], needs_gpu=True),
    Knob("channels last", CNN, ["strategy.channels_last=true"], ["strategy.channels_last=false"]),
    Knob(
        "vocabulary of 50257 rounded up to 50304",
        [*GPT, "data.vocab_size=50257", f"data.global_batch_size={8 if GPU else 2}"],
        [],
        ["model.network.vocab_multiple=1"],
    ),
    Knob(
        "no buffers sent before each step (batch norm, 2 ranks)",
        [*CNN, *DDP, "model.network.norm=batch"],
        [],
        ["strategy.lightning.forward_sync_buffers=true"],
        num_ranks=2,
    ),
    Knob(
        "gradients summed where they lie (2 ranks)",
        [*GPT, *DDP],
        [],
        ["strategy.lightning.gradient_as_bucket_view=false"],
        num_ranks=2,
    ),
    Knob("static graph (2 ranks; off by default)", [*GPT, *DDP], ["+strategy.lightning.static_graph=true"], [], 2),
    Knob("TF32 in fp32", [*CNN, "trainer.precision=32-true"], [], ["matmul_precision=highest"], needs_gpu=True),
    Knob("batches fetched ahead", CNN, [], ["+data.num_ahead=0"], needs_gpu=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--project", type=Path, help="one that benchmarks/fork.py has made; otherwise it is made here")
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project = (asked.project or fork(folder)).resolve()
        chosen = [knob for knob in KNOBS if knob.needs_gpu <= GPU and not (GPU and knob.num_ranks > 1)]
        report([measured(knob, number, project, folder) for number, knob in enumerate(chosen)], asked.out)


def measured(knob: Knob, number: int, project: Path, folder: Path) -> dict[str, Any]:
    def program(name: str, words: Sequence[str]) -> list:
        typed = [word.format(tokens=tokens(folder)) for word in (*knob.words, *words)]
        # Of a word that comes twice the last one counts; Hydra would take both.
        last = list({word.partition("=")[0]: word for word in typed}.values())
        cache = f"callbacks.compile_cache.folder={folder / 'cache'}"
        one = ours(project, folder / f"{name}-{number}", *last, cache)
        return ranks(one, knob.num_ranks) if knob.num_ranks > 1 else [one]

    programs = {"on": program("on", knob.on), "off": program("off", knob.off)}
    took = taken(programs, folder, steps=4, turns=9, warm_up=5)
    ratios = [on / off for on, off in zip(took["on"], took["off"], strict=True)]
    return row(knob.name + WORTH, ratios, "x")


if __name__ == "__main__":
    main()
