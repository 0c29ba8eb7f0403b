"""What it costs that a run can stop and go on: python benchmarks/checkpoints.py [--out results.json]

Ranks are processes of this machine. A step of 10 ms is a pause, at whose end the ranks wait for each other as they do
for gradients. Segments with and without the agreement, and saves and bare copies, take turns.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from cookiecutter.main import cookiecutter
from rows import report, row

TEMPLATE = Path(__file__).resolve().parents[1]
RANKS, STEP, STEPS, SEGMENTS = 4, 0.010, 400, 6
ABOUT = 80  # steps from one agreement to the next
WIDTH, LAYERS, SAVES = 2048, 8, 6  # 34 million parameters: 128 MiB of weights, 256 MiB of Adam's state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a list of rows, in JSON")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="where checkpoints are written"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        project = cookiecutter(str(TEMPLATE), no_input=True, default_config=True, output_dir=folder)
        rows = measured(agreements, RANKS, project) + measured(saves, 1, project)
    report(rows, asked.out)


def measured(benchmark: Callable[[int, Path], list[dict[str, Any]]], ranks: int, project: str) -> list[dict[str, Any]]:
    """The rows of rank 0."""
    out = Path(project) / f"{benchmark.__name__}.json"
    processes.spawn(_rank, (benchmark, ranks, project, out), nprocs=ranks)
    return json.loads(out.read_text())


def _rank(rank: int, benchmark: Callable[..., Any], ranks: int, project: str, out: Path) -> None:
    sys.path.insert(0, f"{project}/src")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{project}/meet-{benchmark.__name__}", rank=rank, world_size=ranks
    )
    rows = benchmark(rank, Path(project))
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def agreements(rank: int, project: Path) -> list[dict[str, Any]]:
    """What agreeing adds to a step: the time in it, over the time of all steps."""
    from hpc.resume.agreement import Agreement, Request

    agreement, token = Agreement(), torch.zeros(1)
    shares, calls, ratios = [], [], []
    step = 0

    def segment(agrees: bool) -> tuple[float, float, int]:
        nonlocal step
        spent, asked, began = 0.0, 0, time.perf_counter()
        for _ in range(STEPS):
            time.sleep(STEP)
            dist.all_reduce(token)
            step += 1
            if agrees:
                at = time.perf_counter()
                due = agreement.due(step)
                spent += time.perf_counter() - at
            if agrees and due:
                dist.barrier()  # whoever is late is waited for by the next step otherwise
                at = time.perf_counter()
                agreement.ask(step, Request())
                spent, asked = spent + time.perf_counter() - at, asked + 1
            elif not agrees and step % ABOUT == 0:
                dist.barrier()
        return time.perf_counter() - began, spent, asked

    segment(True)  # the first steps ask often
    for _ in range(SEGMENTS):
        agreement.next_step = step + 1
        lasted, spent, asked = segment(True)
        alone, _, _ = segment(False)
        shares.append(100 * spent / lasted)
        calls.append(STEPS / max(asked, 1))
        ratios.append(100 * (lasted / alone - 1))
    return [
        row(f"agreeing on a flag, {RANKS} ranks, steps of 10 ms: added", shares, "%", 0.5),
        row("the same, from the time of whole segments with and without", ratios, "%"),
        row("steps from one agreement to the next, which exchange nothing", calls, ""),
    ]


def saves(rank: int, project: Path) -> list[dict[str, Any]]:
    """How long a save holds up training, over a bare copy of the same tensors, and over the whole writing."""
    import lightning

    from hpc.checkpoint import on_disk as checkpoint
    from hpc.checkpoint.strategy_state import ON_PUBLISHED
    from hpc.training import strategies

    stalls, copies, wholes = [], [], []

    class Deep(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layers(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Saving(lightning.Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, saved: dict[str, Any]) -> None:
            saved[ON_PUBLISHED] = Path.exists  # without something to do afterwards, a save is waited for

        def on_train_batch_end(self, trainer: Any, module: Any, *others: Any) -> None:
            held = [state for one in trainer.optimizers[0].state.values() for state in one.values()]
            tensors = [*module.parameters(), *held]
            began = time.perf_counter()
            trainer.save_checkpoint(checkpoint.checkpoint_path(project / "run", trainer.global_step))
            stalled = time.perf_counter() - began
            trainer.strategy.writer.wait()
            whole = time.perf_counter() - began
            began = time.perf_counter()
            there = [tensor.detach().clone() for tensor in tensors]
            copied = time.perf_counter() - began
            del there
            if trainer.global_step > 1:  # the first one imports and makes groups
                stalls.append(stalled), copies.append(copied), wholes.append(whole)

    (project / "run/checkpoints").mkdir(parents=True)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(SAVES + 1, WIDTH)))
    strategy = strategies.Single(torch.device("cpu"))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=SAVES + 1, logger=False,
        callbacks=[Saving()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Deep(), data)
    over_copy = [stalled / copied for stalled, copied in zip(stalls, copies, strict=True)]
    of_whole = [100 * stalled / whole for stalled, whole in zip(stalls, wholes, strict=True)]
    return [
        row("a save holds up training, over a bare copy of its tensors", over_copy, "x"),
        row("a save holds up training, of the time till it is whole", of_whole, "%"),
        row("a save of 384 MiB holds up training", stalls, "s"),
        row("the bare copy", copies, "s"),
    ]


if __name__ == "__main__":
    main()
