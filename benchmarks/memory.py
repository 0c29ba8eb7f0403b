"""The planner's memory against what torch counts: python benchmarks/memory.py [--gpu [--project DIR]] [--out FILE]

Networks of full size, in a plain training loop. Without --gpu torch's MemTracker counts tensors without content; with
it CUDA's allocator counts real ones, of those runs that the plan says will fit.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fork import fork
from rows import report, row

TEXT = ["data=stdlib", "data.vocab_size=50257"]
NETWORKS = {
    "ResNet-50": ["model=resnet50", "data=packed", "data.file=x", "+data.image_size=224", "+data.num_classes=1000"],
    "GPT 124M": ["model=gpt_124m", *TEXT, "data.block_size=1024"],
    "GPT 1B": ["model=gpt_1b", *TEXT, "data.block_size=2048"],
    "GPT 7B": ["model=gpt_7b", *TEXT, "data.block_size=2048"],
}
PRECISIONS = ("32-true", "bf16-mixed")
BATCHES = (1, 8, 32)
Case = tuple[str, str, bool, int]  # network, precision, is it checkpointed, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="count on this machine's GPU")
    parser.add_argument("--project", type=Path, help="one that benchmarks/fork.py has made; otherwise it is made here")
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    asked = parser.parse_args()
    if asked.gpu and not torch.cuda.is_available():
        print("no GPU here: memory is not compared with one")
        return
    cases = list(product(NETWORKS, PRECISIONS, (False, True), BATCHES))
    # A process for each case on a GPU: what one leaves behind there is not the next one's.
    workers, each = (1, 1) if asked.gpu else (os.cpu_count() or 1, None)
    with tempfile.TemporaryDirectory() as folder:
        project = (asked.project or fork(Path(folder))).resolve()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, enter, (project,), max_tasks_per_child=each) as pool:
            found = dict(zip(cases, pool.map(partial(compared, gpu=asked.gpu), cases), strict=True))
    for (network, precision, again, batch), sizes in found.items():
        name = f"{network}, {precision}, {'checkpointed, ' if again else ''}batch of {batch}"
        print(f"{name:50} {told(*sizes)}")
    report(judged(found, asked.gpu), asked.out)


def enter(project: Path) -> None:
    """The modules of a project, and what its tests count by, can be imported."""
    sys.path[:0] = [str(project / "src"), str(project / "tests")]


def compared(case: Case, gpu: bool) -> tuple[float, float | None]:
    """Bytes that are planned, and that were counted; None: it was not tried, as the plan says it does not fit.

    Of a run that should fit and does not, infinitely many were counted.
    """
    from tracked import on_gpu, tracked

    from hpc.config import build, compose
    from hpc.plan.memory import predict_memory
    from hpc.plan.setup import setup_from_config
    from hpc.plan.tracer import trace_network

    network, precision, again, batch = case
    words = [f"trainer.precision={precision}", f"data.global_batch_size={batch}"]
    words.append(f"strategy.activation_checkpointing={again}")
    cfg = compose.compose_overrides([*NETWORKS[network], *words], personal=False)
    layout, make, optimize = setup_from_config(cfg), partial(build.build, cfg.model.network), cfg.model.optimizer
    planned = predict_memory(trace_network(make, build.build(optimize), *layout.computes_in), layout).total
    if not gpu:
        return planned, tracked(cfg, layout)
    if planned > torch.cuda.mem_get_info()[0]:
        return planned, None
    try:
        return planned, on_gpu(cfg, layout)
    except torch.OutOfMemoryError:
        return planned, float("inf")


def told(planned: float, counted: float | None) -> str:
    if counted is None:
        return f"{planned / 1e9:7.2f} GB, does not fit"
    return f"{planned / 1e9:7.2f} GB for {counted / 1e9:7.2f} GB {planned / counted - 1:+6.1%}"


def judged(found: dict[Case, Any], gpu: bool) -> list[dict[str, Any]]:
    """The rows of results.json: errors in percent."""
    by = "CUDA's allocator" if gpu else "torch's tracker"
    tried = [(planned, counted) for planned, counted in found.values() if counted is not None]
    errors = [100 * abs(planned / counted - 1) for planned, counted in tried if counted < float("inf")]
    rows = [
        row(f"plan: error of memory, against {by}", [statistics.mean(errors)], "%", 5),
        row(f"plan: largest error of memory, against {by}", [max(errors)], "%", 12),
        row(f"plan: runs whose memory was compared with {by}", [len(errors)], "", 12, "higher"),
    ]
    if gpu:
        rows.append(row("plan: runs that should fit and ran out of memory", [len(tried) - len(errors)], "", 0))
    return rows


if __name__ == "__main__":
    main()
