"""How fast training is: samples per second, TFLOP/s, their share of the device's peak, and where a step's time goes."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hpc.config.errors import first_line
from hpc.jobs.hardware import peak
from hpc.monitor.flops import training_flops
from hpc.training.curves import show


@dataclass
class Window:
    """The steps from one point of the curves to the next, as rank 0 saw them. Times in seconds."""

    began: float
    # For data: what the clock showed at the beginning, at the end what has come on top; None: nobody measures it.
    waited: float | None
    steps: int = 0
    examples: int = 0
    count: int = 0  # samples or tokens
    units: set[str] = field(default_factory=set)  # of the batches
    shapes: set[torch.Size] = field(default_factory=set)  # of a sample, of which there should be one
    spans: list[tuple[Any, Any]] = field(default_factory=list)  # when the device began and ended a batch
    ended: float = 0.0

    def add(self, batch: Any) -> None:
        """Count by its first tensor. Integers are taken for tokens where they have two dimensions: samples and time."""
        inputs = first_tensor(batch)
        if inputs is None:
            self.units.add("")
            return
        is_text = inputs.dtype == torch.int64 and inputs.ndim == 2
        self.examples += len(inputs)
        self.count += inputs.numel() if is_text else len(inputs)
        self.units.add("tokens" if is_text else "samples")
        self.shapes.add(inputs.shape[1:])

    @property
    def unit(self) -> str:
        """samples or tokens; empty where not all batches can be counted alike."""
        return next(iter(self.units)) if len(self.units) == 1 else ""


class Throughput(L.Callback):
    """Means over the last `trainer.log_every_n_steps` steps, without the validations between them.

    perf/samples_per_second (of text: tokens) of all devices, and _per_device; perf/tflops per device, and perf/mfu, its
    share of the peak; perf/step_seconds and what they go into: compute (on a GPU: it is busy with a batch), data (the
    wait for a batch, unless a GPU computed meanwhile) and other. What is not known of a run is left out.

    Lightning's ThroughputMonitor waits for the device at every batch, and knows neither the FLOPs nor this split.
    """

    def __init__(self) -> None:
        self._window: Window | None = None
        self._last: tuple[int, Window] | None = None  # its steps may still run on the device
        self._since: Any = None
        self._paused = 0.0
        self._flops: float | None = None
        self._example: torch.Size | None = None  # the shape that the FLOPs are counted for
        self._peak: float | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit" or not trainer.is_global_zero:
            return
        if waited(trainer) is None:
            name = type(trainer.profiler).__name__
            print(f"no perf/data_seconds: trainer.profiler is {name}, which does not measure it; "
                  "that of configs/trainer/base.yaml does", flush=True)  # fmt: skip
        network: Any = getattr(pl_module, "network", None)
        if not hasattr(network, "example_input"):
            print("no perf/tflops: the module has no `network` with example_input(batch_size)", flush=True)
            return
        try:
            with isolate_rng(include_cuda=False):  # this rank alone asks
                self._flops, self._example = training_flops(network), network.example_input(1).shape[1:]
        except Exception as error:  # of the network's own
            print(f"no perf/tflops: they cannot be counted: {type(error).__name__}: {first_line(error)}", flush=True)
            return
        device, tf32 = trainer.strategy.root_device, torch.get_float32_matmul_precision() != "highest"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak = peak(name, str(trainer.precision), tf32)
        if self._peak is None:
            print(f"no MFU: hpc/jobs/hardware.yaml has no peak of {name!r} in {trainer.precision}", flush=True)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._since = now(pl_module.device)

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        last_of_step = not trainer.fit_loop._should_accumulate()  # as Lightning decides: an epoch may end with fewer
        if (window := self._window) is None:  # what the first step compiles and allocates is not its speed
            self._window = Window(perf_counter(), waited(trainer)) if last_of_step else None
            return
        window.spans.append((self._since, now(pl_module.device)))
        window.add(batch)
        window.steps += last_of_step
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
        if last_of_step and (step + 1) % trainer.log_every_n_steps == 0:
            window.ended, so_far = perf_counter(), waited(trainer)
            window.waited = None if so_far is None else so_far - (window.waited or 0.0)
            self._window = Window(window.ended, so_far)
            self._write(trainer)
            self._last = (step, window)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._paused = perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._window:
            self._window.began += perf_counter() - self._paused

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._write(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if self._last is None:
            return
        (step, window), self._last = self._last, None
        replicas = (getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)
        if self._flops and window.shapes != {self._example}:
            shapes = ", ".join(str(list(shape)) for shape in window.shapes) or "not known"
            print(f"no perf/tflops: they are counted for the network's example_input of shape "
                  f"{list(self._example or ())} per sample; in the batches it is {shapes}", flush=True)  # fmt: skip
            self._flops = None
        numbers = speed(window, replicas, trainer.world_size, self._flops, self._peak)
        shown = {f"{window.unit}/s": f"perf/{window.unit}_per_second", "mfu": "perf/mfu"}
        show(trainer, {short: numbers[name] for short, name in shown.items() if name in numbers})
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step)


def speed(window: Window, replicas: int, world_size: int, flops: float | None, peak: float | None) -> dict[str, float]:
    """The curves' numbers, of which those that are not known are left out.

    Args:
        replicas: ranks that get different samples.
        flops: of an example, forward and backward, None: unknown.
        peak: FLOP/s of a device, None: unknown.
    """
    seconds = window.ended - window.began
    compute = sum(between(*span) for span in window.spans)
    split, numbers, unit = {"step": seconds, "compute": compute}, {}, window.unit
    if window.waited is not None:
        data = max(0.0, min(window.waited, seconds - compute))
        split |= {"data": data, "other": max(0.0, seconds - compute - data)}
    if unit:
        rate = window.count * replicas / seconds
        numbers |= {f"perf/{unit}_per_second": rate, f"perf/{unit}_per_second_per_device": rate / world_size}
    if unit and flops is not None:
        flops_per_second = flops * window.examples * replicas / world_size / seconds
        numbers["perf/tflops"] = flops_per_second / 1e12
        numbers |= {"perf/mfu": flops_per_second / peak} if peak else {}
    return numbers | {f"perf/{part}_seconds": value / window.steps for part, value in split.items()}


def first_tensor(batch: Any) -> Tensor | None:
    """The first one in a batch of any structure that has a dimension of samples; None: there is none."""
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0]  # nearly every batch, at less cost
    return next((leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), None)


def now(device: torch.device) -> Any:
    """A moment on the device: an event that it will reach, or the host's clock."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Seconds between two moments. Of a GPU: when it has reached them."""
    if isinstance(start, float):
        return end - start
    end.synchronize()  # long ago: these are the steps before the last point
    return start.elapsed_time(end) / 1000


def waited(trainer: Any) -> float | None:
    """Seconds that training has waited for data so far; None where `trainer.profiler` is another than our clock."""
    return getattr(trainer.profiler, "waited", None)
