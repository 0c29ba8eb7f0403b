"""The speed of training: samples per second, TFLOP/s, MFU, and what the time of a step consists of."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import lightning as L
import torch

from hpc.data.batch_contents import BatchSize, measure_batch
from hpc.jobs.hardware import peak_flops
from hpc.logging.curves import show_in_progress_bar
from hpc.monitor.flops import StepFlops
from hpc.monitor.own_time import OwnTime, data_wait_seconds, elapsed_seconds, record_moment
from hpc.monitor.pauses import PauseClock
from hpc.privates import lightning as privates
from hpc.resume.agreement import Agreement, RankTimes
from hpc.resume.resume import Resume
from hpc.training import dry_run, step_overhead


@dataclass
class Window:
    """The steps of rank 0 between two points of the curves. Times are seconds."""

    begin: float
    # The wait for data: since the start of training at first, within this window at its end; None: not measured.
    waited: float | None
    paused: float = 0.0  # for validations and saves, counted likewise
    num_steps: int = 0
    num_units: int = 0  # samples or tokens
    units: set[str] = field(default_factory=set)  # of the batches
    shapes: set[tuple[float, ...]] = field(default_factory=set)  # of a sample; usually all have the same shape
    spans: list[tuple[Any, Any]] = field(default_factory=list)  # moments at which the device began and ended a batch
    end: float = 0.0
    rank_times: RankTimes | None = None

    def add(self, batch: Any) -> None:
        """Count a batch, of any kind."""
        size = measure_batch(batch)
        if size is None:
            self.units.add("")
            return
        self.num_units += size.num_units
        self.units.add(size.unit)
        self.shapes.add(size.sample_shape)

    @property
    def unit(self) -> str:
        """Either samples or tokens; empty if the batches differ in it."""
        return next(iter(self.units)) if len(self.units) == 1 else ""


class Throughput(L.Callback):
    """Log means over the last `trainer.log_every_n_steps` steps, without validations and saves.

    - perf/samples_per_second (tokens for text) of all devices, and with the suffix _per_device
    - perf/tflops per device, and perf/mfu, their share of the device's peak
    - perf/step_seconds, and its parts compute (the device is busy with a batch), data (it waits for a batch, and no GPU
      computes) and other
    - perf/slowest_rank, which the others wait for, and the seconds of a step that it and the fastest rank spend by
      themselves: perf/own_seconds_slowest_rank, perf/own_seconds_fastest_rank (see `own_time`)

    FLOPs are those of the first batch, per sample or token. A number that is unknown is left out. Lightning's
    ThroughputMonitor synchronizes with the device at every batch, and has neither the FLOPs nor this split.
    """

    def __init__(self) -> None:
        self._window: Window | None = None
        self._finished: tuple[int, Window] | None = None  # step and window, which the device may still compute
        self._batch_begin: Any = None
        self._pauses: PauseClock | None = None
        self._step_flops: StepFlops | None = None  # until the first batch
        self._counted: BatchSize | None = None  # the first batch, whose FLOPs were counted
        self._flops_per_unit: float | None = None
        self._peak_flops: float | None = None
        self._own_time: OwnTime | None = None
        self._agreement: Agreement | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.world_size == 1:
            step_overhead.disable_hook(self, "on_before_backward")
        if not trainer.is_global_zero:
            return
        self._pauses = PauseClock(trainer)
        if data_wait_seconds(trainer) is None:
            name = type(trainer.profiler).__name__
            print(f"perf/data_seconds is not logged: trainer.profiler is {name}, which does not measure it; "
                  "the default of trainer.profiler does", flush=True)  # fmt: skip
        try:
            self._step_flops = StepFlops(pl_module)
        except Exception as error:  # the module may hold what cannot be copied
            print(f"perf/tflops is not logged: the module cannot be copied: {dry_run.explain(error)}", flush=True)

    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        resumes = [callback for callback in trainer.callbacks if isinstance(callback, Resume)]
        if trainer.world_size > 1 and resumes:
            self._own_time = OwnTime(trainer)
            self._agreement = resumes[0].boundary.agreement  # which ranks make anyway: nothing more is exchanged
            self._agreement.take_own_microseconds = self._own_time.take_microseconds

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._step_flops is not None:
            self._count_flops(trainer, batch)
        if self._own_time is not None:
            self._own_time.begin_batch()
        self._batch_begin = record_moment(pl_module.device)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Any) -> None:
        if self._own_time is not None:
            self._own_time.begin_backward(self._batch_begin)

    def _count_flops(self, trainer: L.Trainer, batch: Any) -> None:
        """Count the FLOPs of a training step with the first batch."""
        counter, self._step_flops = self._step_flops, None
        size = measure_batch(batch)
        if counter is None or size is None:
            return  # there is no rate either
        try:
            flops = counter.count(batch, trainer)
        except Exception as error:  # the module may raise any error
            print(f"perf/tflops is not logged: FLOPs cannot be counted: {dry_run.explain(error)}", flush=True)
            return
        if not flops:
            print("perf/tflops is not logged: the step has no operation whose FLOPs are known", flush=True)
            return
        self._counted, self._flops_per_unit = size, flops / size.num_units
        self._find_peak(trainer)

    def _find_peak(self, trainer: Any) -> None:
        device, tf32 = trainer.strategy.root_device, torch.get_float32_matmul_precision() != "highest"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._peak_flops = peak_flops(name, str(trainer.precision), tf32=tf32)
        if self._peak_flops is None:
            why = f"hpc/jobs/hardware.yaml has no peak of {name!r} in {trainer.precision}"
            print(f"perf/mfu is not logged: {why}", flush=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._own_time is None and not trainer.is_global_zero:
            return
        is_step = not privates.is_accumulating(trainer)  # Lightning's own rule: an epoch may end with fewer batches
        if self._own_time is not None and is_step:
            self._own_time.end_step()
        if not trainer.is_global_zero:
            return
        paused = self._pauses.seconds if self._pauses else 0.0
        if (window := self._window) is None:  # the first step compiles and allocates, so it is not measured
            self._window = Window(perf_counter(), data_wait_seconds(trainer), paused) if is_step else None
            return
        window.spans.append((self._batch_begin, record_moment(pl_module.device)))
        window.add(batch)
        window.num_steps += is_step
        step = privates.logged_step(trainer)
        if is_step and (step + 1) % trainer.log_every_n_steps == 0:
            window.end, waited = perf_counter(), data_wait_seconds(trainer)
            window.waited = None if waited is None else waited - (window.waited or 0.0)
            window.paused = paused - window.paused
            window.rank_times = self._agreement.rank_times if self._agreement else None
            self._window = Window(window.end, waited, paused)
            self._write(trainer)
            self._finished = (step, window)

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
        if self._counted and not window.shapes <= {self._counted.sample_shape}:
            print(f"perf/tflops is an estimate from here on: batches differ in shape, and FLOPs are those of the first "
                  f"batch per {self._counted.unit.removesuffix('s')}", flush=True)  # fmt: skip
            self._counted = None
        numbers = window_numbers(
            window,
            num_replicas=replicas,
            world_size=trainer.world_size,
            flops_per_unit=self._flops_per_unit,
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
    flops_per_unit: float | None,
    peak_flops: float | None,
) -> dict[str, float]:
    """Return the numbers to log of a window, without those that are unknown.

    Args:
        num_replicas: ranks that get different samples.
        flops_per_unit: of forward and backward, for a sample or a token; None: unknown.
        peak_flops: FLOP/s of a device; None: unknown.
    """
    seconds = window.end - window.begin - window.paused
    compute = sum(elapsed_seconds(*span) for span in window.spans)
    split, numbers, unit = {"step": seconds, "compute": compute}, {}, window.unit
    if window.waited is not None:
        data = max(0.0, min(window.waited, seconds - compute))
        split |= {"data": data, "other": max(0.0, seconds - compute - data)}
    if unit:
        rate = window.num_units * num_replicas / seconds
        numbers |= {f"perf/{unit}_per_second": rate, f"perf/{unit}_per_second_per_device": rate / world_size}
    if unit and flops_per_unit is not None:
        flops_per_second = flops_per_unit * window.num_units * num_replicas / world_size / seconds
        numbers["perf/tflops"] = flops_per_second / 1e12
        numbers |= {"perf/mfu": flops_per_second / peak_flops} if peak_flops else {}
    if times := window.rank_times:
        numbers["perf/slowest_rank"] = float(times.slowest_rank)
        numbers["perf/own_seconds_slowest_rank"] = times.slowest_seconds
        numbers["perf/own_seconds_fastest_rank"] = times.fastest_seconds
    return numbers | {f"perf/{part}_seconds": value / window.num_steps for part, value in split.items()}
