"""Compare the planned memory with what torch counts: python benchmarks/memory.py [--gpu [--project DIR]] [--out FILE]

Networks of full size run in a plain training loop. Without --gpu torch's MemTracker counts tensors without content.
With --gpu CUDA's allocator counts real ones, for those runs that should fit according to the plan.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from bench_project import make_project, use_project
from result_rows import make_row, print_and_save

COUNTERS = Path(__file__).resolve().parents[1] / "tests" / "hpc"  # the folder of tracked.py
TEXT = ["data=stdlib", "data.vocab_size=50257"]
NETWORKS = {
    "ResNet-50": ["model=resnet50", "data=packed", "data.file=x", "+data.image_size=224", "+data.num_classes=1000"],
    "GPT 124M": ["model=gpt_124m", *TEXT, "data.block_size=1024"],
    "GPT 1B": ["model=gpt_1b", *TEXT, "data.block_size=2048"],
    "GPT 7B": ["model=gpt_7b", *TEXT, "data.block_size=2048"],
}
PRECISIONS = ("32-true", "bf16-mixed")
BATCHES = (1, 8, 32)
Case = tuple[str, str, bool, int]  # network, precision, whether activations are checkpointed, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="count on this machine's GPU")
    parser.add_argument("--project", type=Path, help="a project made by benchmarks/bench_project.py; default: make one")
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    arguments = parser.parse_args()
    if arguments.gpu and not torch.cuda.is_available():
        print("no GPU here: memory is not compared with one")
        return
    cases = list(product(NETWORKS, PRECISIONS, (False, True), BATCHES))
    # On a GPU each case has its own process, so that no case inherits memory from the one before.
    num_workers, cases_per_worker = (1, 1) if arguments.gpu else (os.cpu_count() or 1, None)
    with tempfile.TemporaryDirectory() as folder:
        project = (arguments.project or make_project(Path(folder))).resolve()
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            num_workers, spawn, prepare_worker, (project,), max_tasks_per_child=cases_per_worker
        ) as pool:
            sizes = dict(zip(cases, pool.map(partial(compare_memory, gpu=arguments.gpu), cases), strict=True))
    for (network, precision, is_checkpointed, batch), (planned, counted) in sizes.items():
        name = f"{network}, {precision}, {'checkpointed, ' if is_checkpointed else ''}batch of {batch}"
        print(f"{name:50} {describe_sizes(planned, counted)}")
    print_and_save(make_rows(sizes, gpu=arguments.gpu), arguments.out)


def prepare_worker(project: Path) -> None:
    """Make importable the modules of a project, and the counters of the tests of hpc."""
    use_project(project)
    sys.path.insert(0, str(COUNTERS))


def compare_memory(case: Case, gpu: bool) -> tuple[float, float | None]:
    """Return the planned and the counted bytes.

    None counted: the run was not tried, as it does not fit according to the plan. Infinite: it should have fitted, but
    ran out of memory.
    """
    from tracked import on_gpu, tracked

    from hpc.config import build, compose
    from hpc.plan.memory import predict_memory
    from hpc.plan.setup import setup_from_config
    from hpc.plan.tracer import trace_step

    network, precision, is_checkpointed, batch = case
    words = [f"trainer.precision={precision}", f"data.global_batch_size={batch}"]
    words.append(f"strategy.activation_checkpointing={is_checkpointed}")
    cfg = compose.compose_overrides([*NETWORKS[network], *words], personal=False)
    setup = setup_from_config(cfg)
    checkpointing = setup.checkpointing
    trace = trace_step(partial(build.build, cfg.model), *setup.computes_in, checkpointing=checkpointing)
    planned = predict_memory(trace, setup).total
    if not gpu:
        return planned, tracked(cfg, setup)
    if planned > torch.cuda.mem_get_info()[0]:
        return planned, None
    try:
        return planned, on_gpu(cfg, setup)
    except torch.OutOfMemoryError:
        return planned, float("inf")


def describe_sizes(planned: float, counted: float | None) -> str:
    """Return planned and counted memory, and the error of the plan, as text."""
    if counted is None:
        return f"{planned / 1e9:7.2f} GB, does not fit"
    return f"{planned / 1e9:7.2f} GB for {counted / 1e9:7.2f} GB {planned / counted - 1:+6.1%}"


def make_rows(sizes: Mapping[Case, tuple[float, float | None]], *, gpu: bool) -> list[dict[str, Any]]:
    """Return the rows of results.json: errors of the planned memory in percent.

    Args:
        sizes: planned and counted bytes of each case.
    """
    counter = "CUDA's allocator" if gpu else "torch's tracker"
    tried = [(planned, counted) for planned, counted in sizes.values() if counted is not None]
    errors = [100 * abs(planned / counted - 1) for planned, counted in tried if counted < float("inf")]
    rows = [
        make_row(f"plan: error of memory, against {counter}", [statistics.mean(errors)], "%", 5),
        make_row(f"plan: largest error of memory, against {counter}", [max(errors)], "%", 12),
        make_row(f"plan: runs whose memory was compared with {counter}", [len(errors)], "", 12, "higher"),
    ]
    if gpu:
        rows.append(make_row("plan: runs that should fit and ran out of memory", [len(tried) - len(errors)], "", 0))
    return rows


if __name__ == "__main__":
    main()
