"""The profile of a few steps (profile=true): a trace for Perfetto, a table of the top operators, a one-line summary."""

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
from hpc.monitor.throughput import data_wait_seconds
from hpc.privates.torch import record_memory, write_memory_snapshot

COMMUNICATION = ("nccl", "rccl", "gloo", "c10d")  # prefixes of the names of collectives
Interval = tuple[float, float]  # microseconds


class Profile(L.Callback):
    """Record `steps` optimizer steps of some ranks with torch.profiler, after the first `after` steps.

    It writes into <run_dir>/profile: rank-N.json.gz for https://ui.perfetto.dev, rank-N.txt with the slowest operators
    (also in TensorBoard) and, if `memory`, memory-rank-N.pickle for https://pytorch.org/memory_viz.
    """

    def __init__(
        self, run_dir: str, enabled: bool, *, after: int, steps: int, ranks: list[int], memory: bool = False
    ) -> None:
        self.folder, self.enabled = Path(run_dir) / "profile", enabled
        self.after, self.steps, self.ranks, self.memory = after, steps, ranks, memory
        self._first_step: int | None = None  # of this attempt
        self._recording_step: int | None = None  # at which the recording began
        self._profiler: Any = None
        self._begin_seconds = 0.0
        self._waited_seconds: float | None = None  # for data until the recording began; None: not measured

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.memory and trainer.strategy.root_device.type != "cuda":
            rule = "A snapshot shows the memory of a GPU, and this run has none"
            raise ConfigError("callbacks.profile.memory", True, rule, "callbacks.profile.memory=false")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches or trainer.global_rank not in self.ranks:
            return
        self._first_step = trainer.global_step if self._first_step is None else self._first_step
        # A batch makes several steps if there are several optimizers, and perhaps none with manual optimization.
        if self._recording_step is None and trainer.global_step >= self._first_step + self.after:
            self._begin(trainer)
        elif self._recording_step is not None and trainer.global_step >= self._recording_step + self.steps:
            self._end(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end(trainer)

    def _begin(self, trainer: L.Trainer) -> None:
        on_gpu = trainer.strategy.root_device.type == "cuda"
        if self.memory:
            record_memory(True)
        self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])
        _synchronize(trainer)
        self._profiler.start()
        self._recording_step = trainer.global_step
        self._begin_seconds, self._waited_seconds = perf_counter(), data_wait_seconds(trainer)

    def _end(self, trainer: L.Trainer) -> None:
        if self._profiler is None or self._recording_step is None:
            return
        _synchronize(trainer)
        seconds, waited = perf_counter() - self._begin_seconds, data_wait_seconds(trainer)
        waiting = None if waited is None or self._waited_seconds is None else waited - self._waited_seconds
        recording, self._profiler = self._profiler, None
        recording.stop()
        on_gpu = trainer.strategy.root_device.type == "cuda"
        file, table = self._write_files(trainer, recording, on_gpu)
        num_steps = max(trainer.global_step - self._recording_step, 1)
        kernels, communication = split_events(recording.events(), on_gpu)
        shares = time_shares(kernels, communication, total_seconds=seconds, waiting_seconds=waiting)
        summary = format_shares(shares, seconds / num_steps)
        last = trainer.global_step - 1
        print(f"profile of steps {self._recording_step}-{last}, rank {trainer.global_rank}: {summary}\n"
              f"  {file}.json.gz opens in https://ui.perfetto.dev", flush=True)  # fmt: skip
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_text("profile", f"{summary}\n\n```\n{table}\n```", trainer.global_step)

    def _write_files(self, trainer: L.Trainer, recording: Any, on_gpu: bool) -> tuple[Path, str]:
        """Write the trace, the table and the snapshot of this rank; return their path without suffix, and the table."""
        self.folder.mkdir(exist_ok=True)
        file = self.folder / f"rank-{trainer.global_rank}"
        recording.export_chrome_trace(f"{file}.json.gz")
        sort_key = f"self_{'device' if on_gpu else 'cpu'}_time_total"
        table = recording.key_averages().table(sort_by=sort_key, row_limit=25, max_name_column_width=60)
        file.with_suffix(".txt").write_text(table, encoding="utf-8")
        if self.memory:
            write_memory_snapshot(str(self.folder / f"memory-{file.name}.pickle"))
            record_memory(False)
        return file, table


def split_events(events: Iterable[Any], on_gpu: bool) -> tuple[list[Interval], list[Interval]]:
    """Return the intervals of arithmetic and of communication, on the GPU or in PyTorch's operators on the CPU."""
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


def time_shares(
    kernels: list[Interval],
    communication: list[Interval],
    *,
    total_seconds: float,
    waiting_seconds: float | None,
) -> dict[str, float]:
    """Return shares of the time: kernels, communication (beside no kernel), hidden communication, data, host.

    If the wait for data was not measured, the remaining time is "host or data".
    """
    kernel_seconds, busy_seconds = covered_seconds(kernels), covered_seconds(kernels + communication)
    exposed = busy_seconds - kernel_seconds
    remaining = max(0.0, total_seconds - busy_seconds)
    parts = {"kernels": kernel_seconds, "communication": exposed}
    if waiting_seconds is None:
        parts["host or data"] = remaining
    else:
        data = min(max(0.0, waiting_seconds), remaining)
        parts |= {"data": data, "host": remaining - data}
    parts["hidden"] = covered_seconds(communication) - exposed
    return {part: value / total_seconds for part, value in parts.items()}


def covered_seconds(intervals: list[Interval]) -> float:
    """Return the seconds that lie in at least one interval."""
    total, covered_until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total / 1e6


def format_shares(shares: dict[str, float], step_seconds: float) -> str:
    """Return the shares of a step as one line."""
    parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if part != "hidden")
    hidden = f"; communication behind kernels {shares['hidden']:.0%}" if shares["hidden"] > 0.005 else ""
    return f"{1000 * step_seconds:.1f} ms a step: {parts}{hidden}"


def _synchronize(trainer: L.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
