"""Check the throughput that a run reports, a network's FLOPs, and a device's peak."""

import random
import re
import socket
import threading
from collections import UserDict
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from fork import QUIET, scalars
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from hpc.jobs.hardware import peak_flops
from hpc.monitor import own_time, pauses, throughput
from hpc.monitor.flops import StepFlops
from hpc.monitor.throughput import Throughput, Window, window_numbers
from hpc.report import run_data
from hpc.report.findings import list_findings
from hpc.report.run_statistics import RunStatistics
from hpc.run import history
from hpc.training import step_overhead
from hpc.training.step_overhead import DataWaitClock
from my_research.models.gpt import GPT
from my_research.models.resnet import ResNet
from my_research.module import Classifier


def training_flops(network: torch.nn.Module, num_examples: int = 1) -> float:
    """Return the FLOPs of a training step per example."""
    module = Classifier(network, partial(torch.optim.SGD, lr=0.1))
    return StepFlops(module).count(module.example_batch(num_examples)) / num_examples


def test_the_flops_of_a_gpt_are_those_of_the_formula() -> None:
    """Compare with 6 N + 12 L d T per token (PaLM, appendix B), N without the input embedding's lookup."""
    layers, width, time, vocab = 3, 64, 32, 128
    network = GPT(num_layers=layers, num_heads=4, width=width, vocab_size=vocab, block_size=time)
    weights = layers * 12 * width**2 + vocab * width
    assert training_flops(network) == time * (6 * weights + 12 * layers * width * time)


def test_tracing_changes_neither_the_network_nor_the_random_numbers() -> None:
    network = GPT(num_layers=1, num_heads=2, width=16, vocab_size=11, block_size=8, dropout=0.5)
    before, random = {k: v.clone() for k, v in network.state_dict().items()}, torch.get_rng_state()
    training_flops(network)
    assert torch.equal(random, torch.get_rng_state()) and network.training
    assert all(p.grad is None and p.device.type == "cpu" for p in network.parameters())
    assert all(torch.equal(network.state_dict()[name], value) for name, value in before.items())


@pytest.mark.slow
def test_a_network_of_any_size_costs_no_memory() -> None:
    with torch.device("meta"):  # 6.7 billion parameters
        network = GPT(num_layers=32, num_heads=32, width=4096, vocab_size=50304, block_size=2048)
    assert training_flops(network) / 2048 == pytest.approx(6 * 6.65e9 + 12 * 32 * 4096 * 2048, rel=0.01)


@pytest.mark.slow
def test_the_flops_of_resnet_50_are_the_published_ones() -> None:
    """Compare with torchvision's table: 4.09 billion multiply-adds forward for 224 pixels.

    Backward takes twice as many.
    """
    network = ResNet(depths=[3, 4, 6, 3], widths=[64, 128, 256, 512], num_classes=1000, image_size=224, bottleneck=True)
    first = 2 * 7 * 7 * 3 * 64 * 112 * 112  # no gradient is needed for the image itself
    assert training_flops(network) == pytest.approx(3 * 2 * 4.09e9 - first, rel=0.01)


def test_a_window_adds_up() -> None:
    window = Window(begin=100.0, waited=2.0, end=110.0, num_steps=20)
    for i in range(20):
        window.add(torch.zeros(8, 16, dtype=torch.int64))
        window.spans.append((100.0 + i / 4, 100.2 + i / 4))
    numbers = window_numbers(window, num_replicas=4, world_size=8, flops_per_unit=1e12 / 16, peak_flops=64e12)
    assert numbers["perf/tokens_per_second"] == 20 * 8 * 16 * 4 / 10
    assert numbers["perf/tokens_per_second_per_device"] == 20 * 8 * 16 * 4 / 10 / 8
    assert numbers["perf/tflops"] == pytest.approx(20 * 8 * 4 / 10 / 8)
    assert numbers["perf/mfu"] == pytest.approx(8 / 64)
    parts = [numbers[f"perf/{part}_seconds"] for part in ("step", "compute", "data", "other")]
    assert parts == pytest.approx([0.5, 0.2, 0.1, 0.2])


def test_waiting_for_data_while_a_gpu_computes_costs_nothing() -> None:
    window = Window(begin=0.0, waited=9.0, end=10.0, num_steps=10, spans=[(0.0, 9.5)])
    window.add(torch.zeros(8, 3))
    numbers = window_numbers(window, num_replicas=1, world_size=1, flops_per_unit=1.0, peak_flops=None)
    assert numbers["perf/data_seconds"] == pytest.approx(0.05) and "perf/mfu" not in numbers
    assert numbers["perf/samples_per_second"] == 0.8


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.4),
        ("NVIDIA H100 PCIe", "bf16-true", 756.0),
        ("NVIDIA GH200 120GB", "bf16-mixed", 989.4),
        ("NVIDIA A100-SXM4-40GB", "32-true", 156.0),
        ("Tesla V100-SXM2-32GB", "16-mixed", 125.0),
        ("Tesla V100-SXM2-32GB", "32-true", 15.7),
        ("NVIDIA L40S", "bf16-mixed", 362.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16-mixed", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "bf16-mixed", None),
        ("AMD Instinct MI250X", "bf16-mixed", 191.5),
        ("Tesla V100-SXM2-32GB", "bf16-mixed", None),
        ("cpu", "32-true", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_the_arithmetic(name: str, precision: str, tera: float | None) -> None:
    assert peak_flops(name, precision, tf32=True) == (tera and pytest.approx(tera * 1e12))


def test_elapsed_seconds_between_two_moments() -> None:
    from hpc.monitor.throughput import elapsed_seconds, record_moment

    start = record_moment(torch.device("cpu"))
    assert 0 <= elapsed_seconds(start, record_moment(torch.device("cpu"))) <= perf_counter() - start


# In training


class Module(L.LightningModule):
    def __init__(self, network: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.network = network or torch.nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(torch.ones(1, 3)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def points(folder: Path, batches: list[Any], module: L.LightningModule | None = None, **options: Any) -> dict:
    """Return the values logged at each step after the first."""
    logger, logs = CSVLogger(folder), {}
    logger.log_metrics = lambda metrics, step=None: logs.update({step: dict(metrics)})
    trainer = L.Trainer(
        accelerator="cpu", logger=logger, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, default_root_dir=folder,
        **{"callbacks": [Throughput()], "max_epochs": 1, "log_every_n_steps": 1, "profiler": DataWaitClock()} | options,
    )  # fmt: skip
    trainer.fit(module or Module(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return logs


PAIR = (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("every", [1, 3])
def test_an_epoch_may_end_with_a_step_of_fewer_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    windows: list[Window] = []

    def log(window: Window, **facts: Any) -> dict[str, float]:
        windows.append(window)
        return window_numbers(window, **facts)

    monkeypatch.setattr(throughput, "window_numbers", log)
    logs = points(tmp_path, [PAIR] * 8, accumulate_grad_batches=3, max_epochs=3, log_every_n_steps=every)
    expected = {1: [(step, 1, 2 if step % 3 == 2 else 3) for step in range(1, 9)], 3: [(2, 2, 5), (5, 3, 8), (8, 3, 8)]}
    logged = [(step, window.num_steps, len(window.spans)) for step, window in zip(logs, windows, strict=True)]
    assert logged == expected[every]


class Clock:
    """A clock that goes on only where a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Validated(Module):
    """A module whose steps take a second, whose validation needs 10 s for its workers, and whose saves take 1000 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.clock.now += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += 100

    def val_dataloader(self) -> Any:
        clock = self.clock

        class SlowToStart(DataLoader):
            def __iter__(self) -> Any:
                clock.now += 10
                return super().__iter__()

        return SlowToStart([PAIR], batch_size=None)  # type: ignore[arg-type]

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step % 3 == 0:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "own.ckpt")

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "validated.ckpt")

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        self.clock.now += 1000


@pytest.mark.parametrize("every", [1, 4])
def test_validations_with_their_workers_and_saves_are_no_part_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    clock = Clock()
    for module in (throughput, own_time, pauses, step_overhead):
        monkeypatch.setattr(module, "perf_counter", clock)
    options = {"max_epochs": 2, "val_check_interval": 2, "log_every_n_steps": every}
    logs = points(tmp_path, [PAIR] * 8, Validated(clock), **options)
    seconds = [numbers["perf/step_seconds"] for numbers in logs.values() if "perf/step_seconds" in numbers]
    assert len(seconds) == {1: 15, 4: 4}[every] and clock.now == 16 + 9 * 110 + 13 * 1000
    assert seconds == [1.0] * len(seconds)


@pytest.mark.parametrize("profiler", [None, SimpleProfiler(), DataWaitClock()])
def test_a_wait_that_was_not_measured_is_left_out(
    tmp_path: Path, profiler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = points(tmp_path, [PAIR] * 3, profiler=profiler)
    parts = {name.removesuffix("_seconds") for numbers in logs.values() for name in numbers if "_seconds" in name}
    lines = [line for line in capsys.readouterr().out.splitlines() if "perf/data_seconds" in line]
    if isinstance(profiler, DataWaitClock):
        assert parts == {"perf/step", "perf/compute", "perf/data", "perf/other"} and not lines
    else:
        assert parts == {"perf/step", "perf/compute"}
        (line,) = lines
        assert "trainer.profiler" in line


ROWS, IDS, PIXELS = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 5, 5, dtype=torch.int64)


class Pairs:
    """A batch of samples of different sizes."""

    num_graphs = 2

    def __init__(self, num_rows: int = 5) -> None:
        self.x = torch.zeros(num_rows, 3)

    def to(self, device: Any) -> "Pairs":
        return self


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "unit"),
    [
        (PAIR, "samples"),
        ([ROWS], "samples"),
        ((IDS, IDS), "tokens"),
        (ROWS, "samples"),
        ({"inputs": ROWS, "targets": IDS}, "samples"),
        ({"input_ids": IDS}, "tokens"),
        (({"inputs": ROWS}, IDS), "samples"),
        ((PIXELS, IDS), "samples"),  # integers, but no text
        ((IDS[:, 0], ROWS), "samples"),
        ({"temperature": torch.tensor(1.0), "name": "x", "inputs": ROWS}, "samples"),
        (UserDict({"input_ids": IDS}), "tokens"),  # as Hugging Face's BatchEncoding
        (Pairs(), "samples"),
        ({"name": "x"}, None),
        (torch.tensor(1.0), None),
        ("x", None),
        ((), None),
    ],
)
def test_a_batch_may_have_any_shape(tmp_path: Path, batch: Any, unit: str | None) -> None:
    logs = points(tmp_path, [batch] * 3)
    assert list(logs) == [1, 2] and all(numbers["perf/step_seconds"] > 0 for numbers in logs.values())
    for numbers in logs.values():
        rates = {f"perf/{unit}_per_second", f"perf/{unit}_per_second_per_device"} if unit else set()
        assert {name for name in numbers if "_per_second" in name} == rates
        assert ("perf/tflops" in numbers) == bool(unit)
    if unit:
        assert all(
            numbers[f"perf/{unit}_per_second"] * numbers["perf/step_seconds"]
            == pytest.approx(6 if unit == "tokens" else 2)
            for numbers in logs.values()
        )


class Counts(Module):
    """A module whose step changes it, draws numbers, and gives its result to others."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps, self.outputs = 0, []
        self.register_buffer("mean", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        noise = torch.rand(1) + random.random() + float(np.random.rand())
        self.mean += batch[0].mean(0)
        self.outputs.append(noise)
        batch[0].add_(1.0)
        self.log("loss", noise)
        return (self.network(batch[0]) * noise).sum()


def test_counting_changes_nothing() -> None:
    module, batch = Counts(), (torch.ones(2, 3),)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert StepFlops(module).count(batch) == 2 * 2 * (2 * 3)  # forward, and the gradient of the weights
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert (module.num_steps, module.outputs) == (0, []) and not module.mean.any() and bool((batch[0] == 1).all())
    assert all(parameter.grad is None for parameter in module.parameters())


class TwoBackwards(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            self.manual_backward(self.network(batch[0]).sum())
            optimizer.step()
            optimizer.zero_grad()


class Recomputes(Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = batch[0].clone().requires_grad_()
        return checkpoint(self.network, inputs, use_reentrant=self.use_reentrant).sum()


def test_all_backward_passes_count_and_no_recomputation() -> None:
    product, batch = 2 * 4 * 3, (torch.zeros(4, 3),)
    assert StepFlops(TwoBackwards()).count(batch) == 2 * 2 * product
    for use_reentrant in (False, True):
        assert StepFlops(Recomputes(use_reentrant=use_reentrant)).count(batch) == 3 * product


class Item(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.network(batch[0]).sum()
        self.seen = loss.item()  # a value
        return loss


class Locked(Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Item, r"FLOPs cannot be counted: test_throughput.py:\d+, `self.seen = loss.item\(\)  # a value`: it needs"),
        (Locked, "the module cannot be copied: TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_flops_that_cannot_be_counted_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, message: str
) -> None:
    logs = points(tmp_path, [PAIR] * 3, make())
    assert all("perf/tflops" not in numbers and "perf/samples_per_second" in numbers for numbers in logs.values())
    assert re.search(message, capsys.readouterr().out)


def test_batches_of_other_shapes_make_an_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = points(tmp_path, [Pairs(5), Pairs(5), Pairs(9), Pairs(7), Pairs(5)])
    assert all(numbers["perf/tflops"] > 0 for numbers in logs.values())
    assert capsys.readouterr().out.count("perf/tflops is an estimate from here on") == 1


class Gathers(Module):
    """A module that meets the other ranks, if there are any."""

    group: Any = None

    def setup(self, stage: str) -> None:
        if torch.distributed.is_initialized():
            self.group = torch.distributed.new_group()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.network(batch[0]).sum()
        if self.group is not None:
            torch.distributed.all_reduce(loss.detach(), group=self.group)
        return loss


def _count_on_one_rank(rank: int) -> float:
    flops = StepFlops(Gathers()).count(PAIR) if rank == 0 else 0
    number = torch.ones(1)
    torch.distributed.all_reduce(number)  # the ranks' next exchange is not mixed up
    return float(number) + flops


def test_a_forward_in_which_ranks_wait_for_each_other_is_not_ones_own() -> None:
    own = [
        own_time.OwnTime(
            SimpleNamespace(strategy=DDPStrategy(), profiler=None, lightning_module=network)
        ).has_own_forward
        for network in (torch.nn.BatchNorm1d(3), torch.nn.Sequential(torch.nn.SyncBatchNorm(3)))
    ]
    assert own == [True, False]


@pytest.mark.slow
def test_one_rank_alone_can_count(together: Any) -> None:
    assert together(_count_on_one_rank, 2) == [2.0 + 2 * 2 * 2 * 3, 2.0]


# Slows down the second rank: it computes longer, or waits longer for its data. Ranks exchange times in most steps.
SLOW_RANK = """
import time
from hpc.data.fetching import IndexedDataset
from hpc.resume import agreement
from my_research.module import Classifier

agreement.INTERVAL_SECONDS = 0.02
owner, name = {place}
original = getattr(owner, name)

def slowed(self, *args):
    import torch.distributed as dist
    time.sleep({seconds} * dist.get_rank())
    return original(self, *args)

setattr(owner, name, slowed)
"""


COMPUTES = '(Classifier, "training_step")'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "place", "seconds"),
    [("ddp", COMPUTES, 0.06), ("fsdp", '(IndexedDataset, "__getitem__")', 0.06), ("ddp", COMPUTES, 0.0)],
    ids=["ddp", "fsdp", "healthy"],
)
def test_the_slowest_rank_is_found(start: Any, tmp_path: Path, strategy: str, place: str, seconds: float) -> None:
    words = ["trainer=ddp", f"strategy={strategy}", "trainer.accelerator=cpu", "trainer.devices=2", QUIET]
    words += ["trainer.max_steps=60", "trainer.log_every_n_steps=3", "callbacks.samples=null", "cluster=local"]
    run_dir = tmp_path / "run"
    start(run_dir, 2, words, patch=SLOW_RANK.replace("{place}", place).replace("{seconds}", f"{seconds}"))
    slowest, fastest = (scalars(run_dir, f"perf/own_seconds_{which}_rank") for which in ("slowest", "fastest"))
    sentences = " ".join(list_findings(*_statistics_and_config(run_dir)))
    if not seconds:
        assert len(slowest) >= 10 and " is slow: " not in sentences
        return
    assert scalars(run_dir, "perf/slowest_rank")[-1] == 1
    assert slowest[-1] >= 0.06 and fastest[-1] < slowest[-1] - 0.03
    assert f"Rank 1 on {socket.gethostname()} is slow: by itself it takes" in sentences


def _statistics_and_config(run_dir: Path) -> tuple[RunStatistics, dict[str, Any]]:
    data = run_data.read_run_data(history.find_runs(run_dir)[0])
    return data.statistics, data.config
