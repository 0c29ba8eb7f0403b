"""Where the time of a few steps goes: profile=true. A trace for Perfetto, the top operators as text, and one line."""

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from hpc.config.errors import ConfigError
from hpc.monitor.throughput import waited

COMMUNICATION = ("nccl", "rccl", "gloo", "c10d")  # how the names of work that ranks do together begin
Interval = tuple[float, float]  # microseconds


class Profile(L.Callback):
    """Records `steps` optimizer steps of some ranks with torch.profiler, when `after` steps have passed.

    Leaves in <run_dir>/profile: rank-N.json.gz for https://ui.perfetto.dev, rank-N.txt with the operators that take
    longest (in TensorBoard, too) and, if `memory`, memory-rank-N.pickle for https://pytorch.org/memory_viz.
    """

    def __init__(
        self, run_dir: str, enabled: bool, after: int, steps: int, ranks: list[int], memory: bool = False
    ) -> None:
        self.folder, self.enabled = Path(run_dir) / "profile", enabled
        self.after, self.steps, self.ranks, self.memory = after, steps, ranks, memory
        self._first: int | None = None
        self._step: int | None = None  # where the recording began
        self._profiler: Any = None
        self._began = 0.0
        self._waited: float | None = None  # for data; None: nobody measures it

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.memory and trainer.strategy.root_device.type != "cuda":
            rule = "a snapshot shows the memory of a GPU; this run has none"
            raise ConfigError("callbacks.profile.memory", True, rule, "callbacks.profile.memory=false")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches or trainer.global_rank not in self.ranks:
            return
        self._first = trainer.global_step if self._first is None else self._first
        # With several optimizers a batch may make several steps, and with manual optimization none.
        if self._step is None and trainer.global_step >= self._first + self.after:
            self._begin(trainer)
        elif self._step is not None and trainer.global_step >= self._step + self.steps:
            self._end(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end(trainer)

    def _begin(self, trainer: L.Trainer) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if self.memory:
            torch.cuda.memory._record_memory_history()
        self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        _settle(trainer)
        self._profiler.start()
        self._step, self._began, self._waited = trainer.global_step, perf_counter(), waited(trainer)

    def _end(self, trainer: L.Trainer) -> None:
        if self._profiler is None or self._step is None:
            return
        _settle(trainer)
        seconds, so_far = perf_counter() - self._began, waited(trainer)
        waiting = None if so_far is None or self._waited is None else so_far - self._waited
        recorded, self._profiler = self._profiler, None
        recorded.stop()
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"rank-{trainer.global_rank}"
        recorded.export_chrome_trace(f"{file}.json.gz")
        on_gpu = trainer.strategy.root_device.type == "cuda"
        longest = f"self_{'device' if on_gpu else 'cpu'}_time_total"
        table = recorded.key_averages().table(sort_by=longest, row_limit=25, max_name_column_width=60)
        file.with_suffix(".txt").write_text(table, encoding="utf-8")
        if self.memory:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory-{file.name}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        steps = trainer.global_step - self._step
        said = told(split(*intervals(recorded.events(), on_gpu), seconds, waiting), seconds / max(steps, 1))
        print(f"profile of steps {self._step}-{trainer.global_step - 1}, rank {trainer.global_rank}: {said}\n"
              f"  {file}.json.gz opens in https://ui.perfetto.dev", flush=True)  # fmt: skip
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_text("profile", f"{said}\n\n```\n{table}\n```", trainer.global_step)


def intervals(events: Iterable[Any], on_gpu: bool) -> tuple[list[Interval], list[Interval]]:
    """When arithmetic went on, and when communication did: on the GPU, or else in PyTorch's operators on the CPU."""
    kernels, communication = [], []
    for event in events:
        if on_gpu != (event.device_type == DeviceType.CUDA):
            continue
        interval = (event.time_range.start, event.time_range.end)
        if event.name.lower().startswith(COMMUNICATION):
            communication.append(interval)
        elif on_gpu or event.name.startswith("aten::"):
            kernels.append(interval)
    return kernels, communication


def split(
    kernels: list[Interval], communication: list[Interval], seconds: float, waiting: float | None
) -> dict[str, float]:
    """Shares of the time: kernels; communication that no kernel hides, and hidden; waiting for data; the host.

    Where nobody has measured the wait, it is a part of what is left: "host or data".
    """
    busy, at_all = covered(kernels), covered(kernels + communication)
    exposed = at_all - busy
    left = max(0.0, seconds - at_all)
    parts = {"kernels": busy, "communication": exposed}
    if waiting is None:
        parts["host or data"] = left
    else:
        data = min(max(0.0, waiting), left)
        parts |= {"data": data, "host": left - data}
    return {part: value / seconds for part, value in (parts | {"hidden": covered(communication) - exposed}).items()}


def covered(intervals: list[Interval]) -> float:
    """Seconds that lie in at least one interval."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e6


def told(shares: dict[str, float], seconds: float) -> str:
    """One line."""
    parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if part != "hidden")
    hidden = f"; communication behind kernels {shares['hidden']:.0%}" if shares["hidden"] > 0.005 else ""
    return f"{1000 * seconds:.1f} ms a step: {parts}{hidden}"


def _settle(trainer: L.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
