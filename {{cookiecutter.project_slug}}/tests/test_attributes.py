"""What a module, its data and callbacks keep in attributes that nobody saves: a run that goes on has it, too."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from test_resume import COMMON, assert_same, scalars
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.wrappers import Running

from {{ cookiecutter.package_name }}.hpc.resuming import attributes

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


def trained(module: Whole, *callbacks: L.Callback) -> Any:
    return SimpleNamespace(
        datamodule=None,
        callbacks=list(callbacks),
        is_global_zero=False,
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
