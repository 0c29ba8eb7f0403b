"""What a module, its data and callbacks keep in attributes that nobody saves: a run that goes on has it, too."""

import io
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from test_resume import COMMON, assert_same, scalars
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.wrappers import Running

from {{ cookiecutter.package_name }}.hpc.resuming import attributes, forms

WORDS = [*COMMON, "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1", "+trainer.limit_train_batches=5"]
WORDS += ["trainer=cpu", "trainer.max_epochs=3"]
KEEPS = """
import lightning as L
import torch
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.wrappers import MetricTracker, MinMaxMetric, Running
from {{ cookiecutter.package_name }} import samples
from {{ cookiecutter.package_name }}.hpc.resuming.resume import Resume
from {{ cookiecutter.package_name }}.module import Classifier

made, stepped = Classifier.__init__, Classifier.training_step

def __init__(self, *args, **kwargs):
    made(self, *args, **kwargs)
    self.temperature = 1.0
    self.register_buffer("smooth", torch.zeros(()), persistent=False)
    self.register_buffer("transferred", torch.zeros(()))
    self.last, self.least = Running(MeanMetric(), 3), MinMaxMetric(MeanMetric())
    self.tracked = MetricTracker(MaxMetric(), maximize=True)
    next(self.network.parameters()).requires_grad_(False)

def on_train_start(self):
    self.outputs = []

def on_train_epoch_start(self):
    self.temperature = 1 / (1 + self.current_epoch)
    self.tracked.increment()
    if self.current_epoch == 1:
        next(self.network.parameters()).requires_grad_(True)

def on_after_batch_transfer(self, batch, dataloader_idx):
    if self.training:
        self.transferred += 1
    return batch

def training_step(self, batch, batch_idx):
    self.log("own/transferred", self.transferred.clone())
    loss = stepped(self, batch, batch_idx)
    self.smooth = 0.9 * self.smooth + 0.1 * loss.detach()
    self.outputs.append(loss)
    for metric in (self.last, self.least, self.tracked):
        metric.update(loss.detach())
    own = next(callback for callback in self.trainer.callbacks if isinstance(callback, samples.Samples))
    own.seen = getattr(own, "seen", 0) + 1
    self.log_dict({"own/last": self.last.compute(), "own/most": self.tracked.compute(), "own/seen": float(own.seen)})
    self.log_dict({f"own/{name}": value for name, value in self.least.compute().items()})
    return loss * self.temperature * (1 + self.smooth)

def on_train_epoch_end(self):
    self.log("own/outputs", torch.stack(self.outputs).mean())
    self.outputs.clear()

Classifier.__init__, Classifier.on_train_start = __init__, on_train_start
Classifier.on_train_epoch_start, Classifier.on_train_epoch_end = on_train_epoch_start, on_train_epoch_end
Classifier.on_after_batch_transfer, Classifier.training_step = on_after_batch_transfer, training_step
"""
# Lightning makes them zero at each step; this module does so at every third one.
GATHERS = """
from {{ cookiecutter.package_name }}.module import Classifier

def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
    if batch_idx % 3 == 0:
        optimizer.zero_grad()

Classifier.optimizer_zero_grad = optimizer_zero_grad
"""


@pytest.mark.slow
@pytest.mark.parametrize("stop", [3, 5, 7, 10])  # in the middle of epochs, and when one has ended
@pytest.mark.parametrize("patch", [KEEPS, GATHERS], ids=["keeps", "gathers"])
def test_a_run_that_goes_on_has_what_was_kept(patch: str, stop: int, start: Callable, tmp_path: Path) -> None:
    start(tmp_path / "reference", 1, WORDS, patch=patch)
    start(tmp_path / "run", 1, WORDS, stop - 1, patch)
    said = start(tmp_path / "run", 1, [], patch=patch)
    assert_same(tmp_path / "run", tmp_path / "reference")
    if patch is KEEPS:
        (told,) = [line for line in said.splitlines() if "attributes go on" in line]
        assert "smooth" in told and ("temperature" in told) is (stop > 5)  # it has changed with the second epoch
        assert len(scalars(tmp_path / "run")["own/outputs"]) == 3


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.view, self.width, self.table = self.weight.detach(), 2, torch.zeros(3)


class Whole(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.running = Part(), Running(MeanMetric(), 2)


class Own(L.Callback):
    stage = 0


def trained(module: Whole, *callbacks: L.Callback, datasets: tuple = (), is_global_zero: bool = False) -> Any:
    loaders = [SimpleNamespace(dataset=dataset) for dataset in datasets]
    return SimpleNamespace(
        datamodule=None,
        fit_loop=SimpleNamespace(_combined_loader=SimpleNamespace(flattened=loaders)),
        callbacks=list(callbacks),
        is_global_zero=is_global_zero,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )


def test_what_has_changed_is_kept_and_nothing_else() -> None:
    module, callback = Whole(), Own()
    trainer = trained(module, callback, ModelSummary())
    before = attributes.built(trainer, module)
    assert attributes.changed(trainer, module, before) == []
    with torch.no_grad():
        module.part.weight.add_(1)  # and so its view
    module.part.table[1] = 7
    module.part.weight.requires_grad_(False)
    vars(module.part)["odd"] = object()  # not what a checkpoint can hold
    callback.stage = 2
    module.running.update(torch.tensor(1.0))
    kept = attributes.changed(trainer, module, before)
    assert {(owner, name) for owner, name, _ in kept} == {
        ("module part", "table"),
        ("parameter part.weight", "requires_grad"),
        ("callback Own 1", "stage"),
        ("module running", "_num_vals_seen"),
    }
    again, other = Whole(), Own()
    again.part.width = 5  # built otherwise, on purpose
    attributes.restore(trained(again, other), again, kept)
    assert (again.part.table[1], again.part.weight.requires_grad, other.stage, again.part.width) == (7, False, 2, 5)
    assert again.running._num_vals_seen == 1
    attributes.restore(trained(again), again, [("callback Gone 1", "stage", 3)])


class Memory:
    """An object of the fork's own."""

    def __init__(self) -> None:
        self.seen: deque = deque(maxlen=3)


Memory.__module__ = "{{ cookiecutter.package_name }}.memory"


def test_arrays_generators_containers_and_own_objects_are_kept(capfd: pytest.CaptureFixture) -> None:
    def made() -> Any:
        module: Any = Whole()
        module.memory, module.prototypes, module.counts = Memory(), np.zeros((2, 3)), Counter()
        module.generators = [np.random.default_rng(1), torch.Generator().manual_seed(1), random.Random(1)]
        module.rng = np.random.default_rng(2)
        module.by_class, module.rate, module.odd = defaultdict(list), np.float32(0.5), defaultdict(lambda: 0)
        return module

    module = made()
    trainer = trained(module)
    before = attributes.built(trainer, module)
    assert attributes.changed(trainer, module, before) == []
    module.memory.seen.extend(range(5))
    module.prototypes[1] += 2
    module.counts.update("aab")
    module.by_class[3].append(np.int64(7))
    module.rate *= 2
    module.odd[1] = 2
    module.rng.normal(size=5)
    numpys, torchs, pythons = module.generators
    _ = numpys.normal(size=5), torch.rand(5, generator=torchs), pythons.random()
    stream = io.BytesIO()
    torch.save(attributes.changed(trainer, module, before), stream)
    state = torch.load(io.BytesIO(stream.getvalue()), weights_only=True)

    again = made()
    shared = again.rng
    attributes.restore(trained(again, is_global_zero=True), again, state)
    assert (list(again.memory.seen), again.memory.seen.maxlen) == ([2, 3, 4], 3)
    assert (again.prototypes == module.prototypes).all() and again.counts == Counter("aab")
    assert again.by_class == {3: [7]} and again.by_class.default_factory is list
    assert (again.rate, type(again.rate)) == (1, np.float32)
    assert shared is again.rng and shared.normal() == module.rng.normal()
    assert again.generators[0].normal() == numpys.normal() and again.generators[2].random() == pythons.random()
    assert torch.equal(torch.rand(2, generator=again.generators[1]), torch.rand(2, generator=torchs))
    assert again.odd == {}
    told = capfd.readouterr().out.splitlines()
    assert "attributes begin anew, as a checkpoint does not hold them: odd;" in told[1] and "odd" not in told[0]


def test_what_a_dataset_has_changed_is_told(capfd: pytest.CaptureFixture) -> None:
    dataset, module = SimpleNamespace(stage=0, size=3, rng=np.random.default_rng(1)), Whole()
    trainer = trained(module, datasets=(dataset,), is_global_zero=True)
    before = attributes.built(trainer, module)
    dataset.stage = 2
    dataset.rng.normal()
    state = attributes.changed(trainer, module, before)
    dataset.stage = 0
    attributes.restore(trainer, module, state)
    assert "begin anew, as a checkpoint does not hold them: stage, rng;" in capfd.readouterr().out
    assert dataset.stage == 0


def test_one_entry_of_many_is_a_change_and_so_is_what_a_full_deque_has_lost() -> None:
    losses, memory, bank = [0.0] * 50_000, deque(range(200_000), maxlen=200_000), np.zeros((50_000, 2))
    before = [forms.mark(one) for one in (losses, memory, bank)]
    assert before == [forms.mark(one) for one in (losses, memory, bank)]
    losses[3], bank[7, 1] = 1.0, 1.0
    memory.append(-1)
    assert not any(was == forms.mark(one) for was, one in zip(before, (losses, memory, bank), strict=True))
