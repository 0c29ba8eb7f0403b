"""Measure what it costs that a run can stop and resume: python benchmarks/checkpoints.py [--out results.json]

Ranks are processes of this machine. A step is a pause of 10 ms, after which the ranks wait for each other as they do
for gradients. Segments with and without the agreement, and saves and bare copies, alternate.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from bench_project import use_project
from cookiecutter.main import cookiecutter
from result_rows import make_row, print_and_save

TEMPLATE = Path(__file__).resolve().parents[1]
NUM_RANKS, STEP_SECONDS, STEPS, SEGMENTS = 4, 0.010, 400, 6
STEPS_BETWEEN_AGREEMENTS = 80  # about
WIDTH, LAYERS, SAVES = 2048, 8, 6  # 34 million parameters: 128 MiB of weights, 256 MiB of Adam's state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the JSON file of results, which is updated")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints are written"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        project = cookiecutter(str(TEMPLATE), no_input=True, default_config=True, output_dir=folder)
        rows = measure(agreements, NUM_RANKS, project) + measure(saves, 1, project)
    print_and_save(rows, arguments.out)


def measure(
    benchmark: Callable[[int, Path], list[dict[str, Any]]], num_ranks: int, project: str
) -> list[dict[str, Any]]:
    """Run a benchmark on several ranks, and return the rows of rank 0."""
    out = Path(project) / f"{benchmark.__name__}.json"
    processes.spawn(_run_rank, (benchmark, num_ranks, project, out), nprocs=num_ranks)
    return json.loads(out.read_text())


def _run_rank(rank: int, benchmark: Callable[..., Any], num_ranks: int, project: str, out: Path) -> None:
    use_project(Path(project))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{project}/meet-{benchmark.__name__}", rank=rank, world_size=num_ranks
    )
    rows = benchmark(rank, Path(project))
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def agreements(rank: int, project: Path) -> list[dict[str, Any]]:
    """Measure what agreeing adds to a step: the time spent in it, relative to the time of all steps."""
    from hpc.resume.agreement import Agreement, RankRequest

    agreement, token = Agreement(), torch.zeros(1)
    shares, intervals, ratios = [], [], []
    step = 0

    def run_segment(has_agreement: bool) -> tuple[float, float, int]:
        """Return the seconds of all steps, those spent on agreeing, and the number of agreements."""
        nonlocal step
        agreeing_seconds, num_agreements, start_time = 0.0, 0, time.perf_counter()
        for _ in range(STEPS):
            time.sleep(STEP_SECONDS)
            dist.all_reduce(token)
            step += 1
            is_due = False
            if has_agreement:
                before = time.perf_counter()
                is_due = agreement.is_due()
                agreeing_seconds += time.perf_counter() - before
            if is_due:
                dist.barrier()  # otherwise the next step waits for late ranks
                before = time.perf_counter()
                agreement.all_reduce_requests(RankRequest())
                agreeing_seconds += time.perf_counter() - before
                num_agreements += 1
            elif not has_agreement and step % STEPS_BETWEEN_AGREEMENTS == 0:
                dist.barrier()
        return time.perf_counter() - start_time, agreeing_seconds, num_agreements

    for _ in range(SEGMENTS):
        agreement.restart()
        run_segment(True)  # not measured: agreements are frequent in the first steps
        seconds, agreeing_seconds, num_agreements = run_segment(True)
        seconds_without, _, _ = run_segment(False)
        shares.append(100 * agreeing_seconds / seconds)
        intervals.append(STEPS / max(num_agreements, 1))
        ratios.append(100 * (seconds / seconds_without - 1))
    return [
        make_row(f"agreeing on a flag, {NUM_RANKS} ranks, steps of 10 ms: added", shares, "%", 0.5),
        make_row("the same, from the time of whole segments with and without", ratios, "%"),
        make_row("steps from one agreement to the next, which exchange nothing", intervals, ""),
    ]


def saves(rank: int, project: Path) -> list[dict[str, Any]]:
    """Measure how long a save blocks training, relative to a bare copy of the same tensors and to the whole write."""
    import lightning

    from hpc.checkpoint import on_disk
    from hpc.checkpoint.strategy_state import ON_PUBLISHED
    from hpc.strategies import single

    stalls, copies, writes = [], [], []

    class DeepNetwork(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class TimedSave(lightning.Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, saved: dict[str, Any]) -> None:
            saved[ON_PUBLISHED] = Path.exists  # without such a function training would wait for the save

        def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
            states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
            tensors = [*module.parameters(), *states]
            start_time = time.perf_counter()
            trainer.save_checkpoint(on_disk.checkpoint_path(project / "run", trainer.global_step, attempt=1))
            stall_seconds = time.perf_counter() - start_time
            trainer.strategy.writer.wait()
            write_seconds = time.perf_counter() - start_time
            start_time = time.perf_counter()
            tensor_copies = [tensor.detach().clone() for tensor in tensors]
            copy_seconds = time.perf_counter() - start_time
            del tensor_copies
            if trainer.global_step > 1:  # the first save imports modules and makes process groups
                stalls.append(stall_seconds)
                copies.append(copy_seconds)
                writes.append(write_seconds)

    (project / "run/checkpoints").mkdir(parents=True)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(SAVES + 1, WIDTH)))
    strategy = single.Single(torch.device("cpu"))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=SAVES + 1, logger=False,
        callbacks=[TimedSave()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(DeepNetwork(), data)
    over_copy = [stall / copy for stall, copy in zip(stalls, copies, strict=True)]
    of_write = [100 * stall / write for stall, write in zip(stalls, writes, strict=True)]
    return [
        make_row("a save holds up training, over a bare copy of its tensors", over_copy, "x"),
        make_row("a save holds up training, of the time till it is whole", of_write, "%"),
        make_row("a save of 384 MiB holds up training", stalls, "s"),
        make_row("the bare copy", copies, "s"),
    ]


if __name__ == "__main__":
    main()
