"""The speed of training: samples per second, TFLOP/s, MFU, and what the time of a step consists of."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hpc.config.errors import first_line
from hpc.jobs.hardware import peak_flops
from hpc.monitor.flops import training_flops
from hpc.training.curves import show_in_progress_bar
from hpc.training.step_overhead import DataWaitClock


@dataclass
class Window:
    """The steps of rank 0 between two points of the curves. Times are seconds."""

    begin: float
    # The wait for data: since the start of training at first, within this window at its end; None: not measured.
    waited: float | None
    num_steps: int = 0
    num_examples: int = 0
    num_units: int = 0  # samples or tokens
    units: set[str] = field(default_factory=set)  # of the batches
    shapes: set[torch.Size] = field(default_factory=set)  # of a sample; usually all have the same shape
    spans: list[tuple[Any, Any]] = field(default_factory=list)  # moments at which the device began and ended a batch
    end: float = 0.0

    def add(self, batch: Any) -> None:
        """Count a batch by its first tensor. Integers of two dimensions (samples, time) count as tokens."""
        inputs = first_tensor(batch)
        if inputs is None:
            self.units.add("")
            return
        is_text = inputs.dtype == torch.int64 and inputs.ndim == 2
        self.num_examples += len(inputs)
        self.num_units += inputs.numel() if is_text else len(inputs)
        self.units.add("tokens" if is_text else "samples")
        self.shapes.add(inputs.shape[1:])

    @property
    def unit(self) -> str:
        """Either samples or tokens; empty if the batches differ in it."""
        return next(iter(self.units)) if len(self.units) == 1 else ""


class Throughput(L.Callback):
    """Log means over the last `trainer.log_every_n_steps` steps, without the validations between them.

    - perf/samples_per_second (tokens for text) of all devices, and with the suffix _per_device
    - perf/tflops per device, and perf/mfu, their share of the device's peak
    - perf/step_seconds, and its parts compute (the device is busy with a batch), data (it waits for a batch, and no GPU
      computes) and other

    A number that is unknown is left out. Lightning's ThroughputMonitor synchronizes with the device at every batch, and
    has neither the FLOPs nor this split.
    """

    def __init__(self) -> None:
        self._window: Window | None = None
        self._finished: tuple[int, Window] | None = None  # step and window, which the device may still compute
        self._batch_begin: Any = None
        self._validation_begin = 0.0
        self._flops_per_example: float | None = None
        self._example_shape: torch.Size | None = None  # for which the FLOPs were counted
        self._peak_flops: float | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero:
            return
        if data_wait_seconds(trainer) is None:
            name = type(trainer.profiler).__name__
            print(f"perf/data_seconds is not logged: trainer.profiler is {name}, which does not measure it; "
                  "the profiler of configs/trainer/base.yaml does", flush=True)  # fmt: skip
        network: Any = getattr(pl_module, "network", None)
        if not hasattr(network, "example_input"):
            print("perf/tflops is not logged: the module has no `network` with example_input(batch_size)", flush=True)
            return
        try:
            with isolate_rng(include_cuda=False):  # only this rank counts, and the random numbers must stay alike
                self._flops_per_example = training_flops(network)
                self._example_shape = network.example_input(1).shape[1:]
        except Exception as error:  # the network may raise any error
            why = f"the FLOPs cannot be counted: {type(error).__name__}: {first_line(error)}"
            print(f"perf/tflops is not logged: {why}", flush=True)
            return
        self._find_peak(trainer)

    def _find_peak(self, trainer: Any) -> None:
        device, tf32 = trainer.strategy.root_device, torch.get_float32_matmul_precision() != "highest"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak_flops = peak_flops(name, str(trainer.precision), tf32=tf32)
        if self._peak_flops is None:
            why = f"hpc/jobs/hardware.yaml has no peak of {name!r} in {trainer.precision}"
            print(f"perf/mfu is not logged: {why}", flush=True)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._batch_begin = record_moment(pl_module.device)

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        is_step = not trainer.fit_loop._should_accumulate()  # Lightning's own rule: an epoch may end with fewer batches
        if (window := self._window) is None:  # the first step compiles and allocates, so it is not measured
            self._window = Window(perf_counter(), data_wait_seconds(trainer)) if is_step else None
            return
        window.spans.append((self._batch_begin, record_moment(pl_module.device)))
        window.add(batch)
        window.num_steps += is_step
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if is_step and (step + 1) % trainer.log_every_n_steps == 0:
            window.end, waited = perf_counter(), data_wait_seconds(trainer)
            window.waited = None if waited is None else waited - (window.waited or 0.0)
            self._window = Window(window.end, waited)
            self._write(trainer)
            self._finished = (step, window)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_begin = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._window:
            self._window.begin += perf_counter() - self._validation_begin

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        """Log the finished window, whose last batch the device has reached long ago."""
        if self._finished is None:
            return
        (step, window), self._finished = self._finished, None
        replicas = (getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)
        if self._flops_per_example and window.shapes != {self._example_shape}:
            shapes = ", ".join(str(list(shape)) for shape in window.shapes) or "unknown"
            example_shape = list(self._example_shape or ())
            print(f"perf/tflops is no longer logged: the network's example_input has shape {example_shape} per sample, "
                  f"but the batches have {shapes}", flush=True)  # fmt: skip
            self._flops_per_example = None
        numbers = window_numbers(
            window,
            num_replicas=replicas,
            world_size=trainer.world_size,
            flops_per_example=self._flops_per_example,
            peak_flops=self._peak_flops,
        )
        in_progress_bar = {f"{window.unit}/s": f"perf/{window.unit}_per_second", "mfu": "perf/mfu"}
        show_in_progress_bar(
            trainer, {short: numbers[name] for short, name in in_progress_bar.items() if name in numbers}
        )
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step)


def window_numbers(
    window: Window,
    *,
    num_replicas: int,
    world_size: int,
    flops_per_example: float | None,
    peak_flops: float | None,
) -> dict[str, float]:
    """Return the numbers to log of a window, without those that are unknown.

    Args:
        num_replicas: ranks that get different samples.
        flops_per_example: of forward and backward; None: unknown.
        peak_flops: FLOP/s of a device; None: unknown.
    """
    seconds = window.end - window.begin
    compute = sum(elapsed_seconds(*span) for span in window.spans)
    split, numbers, unit = {"step": seconds, "compute": compute}, {}, window.unit
    if window.waited is not None:
        data = max(0.0, min(window.waited, seconds - compute))
        split |= {"data": data, "other": max(0.0, seconds - compute - data)}
    if unit:
        rate = window.num_units * num_replicas / seconds
        numbers |= {f"perf/{unit}_per_second": rate, f"perf/{unit}_per_second_per_device": rate / world_size}
    if unit and flops_per_example is not None:
        flops_per_second = flops_per_example * window.num_examples * num_replicas / world_size / seconds
        numbers["perf/tflops"] = flops_per_second / 1e12
        numbers |= {"perf/mfu": flops_per_second / peak_flops} if peak_flops else {}
    return numbers | {f"perf/{part}_seconds": value / window.num_steps for part, value in split.items()}


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a batch that has a dimension of samples; None if there is none."""
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0]  # nearly every batch; faster than tree_leaves
    return next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)


def record_moment(device: torch.device) -> Any:
    """Return a moment of the device: an event that a GPU will reach, or else the host's clock."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_seconds(start: Any, end: Any) -> float:
    """Return the seconds between two moments; wait until a GPU has reached them."""
    if isinstance(start, float):
        return end - start
    end.synchronize()  # reached long ago: these steps were before the last point
    return start.elapsed_time(end) / 1000


def data_wait_seconds(trainer: Any) -> float | None:
    """Return how long training has waited for data; None if `trainer.profiler` is not a `DataWaitClock`."""
    return trainer.profiler.waited_seconds if isinstance(trainer.profiler, DataWaitClock) else None
