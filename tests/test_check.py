"""tools/check.py says what does not work with a module. test_readme.py runs it with one for which all works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MINE = '''
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    """Its noise cannot be repeated, and it knows of one process only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        if self.trainer.world_size > 1:
            raise RuntimeError("made for one process")
        loss = (self.layer(batch[0]) * int.from_bytes(os.urandom(4))).square().mean()
        self.log("train/loss", loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-24)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)
'''


@pytest.mark.slow
def test_what_does_not_work_is_said(bake, tmp_path, monkeypatch):
    project: Path = bake(cluster="local")
    (project / "src/mine.py").write_text(MINE)
    for group, name in (("model", "Module"), ("data", "Data")):
        (project / f"configs/{group}/mine.yaml").write_text(f"_target_: mine.{name}\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "tools/check.py", "model=mine", "data=mine"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^(works|fails)  (.*) \(\d+ s\)$", done.stdout, re.MULTILINE) == [
        ("works", "training on one process"),
        ("fails", "a stop in mid-epoch, and a resume that ends with the same weights"),
        ("fails", "ddp on two processes"),
        ("fails", "fsdp on two processes"),
        ("works", "a plan of the step"),
    ]
    # The one that differs more is named.
    assert re.search(
        r"it ends with other weights than without a stop: layer\.(weight|bias) and 1 other, by", done.stdout
    )
    assert len(re.findall(r"       rank [01]: RuntimeError: made for one process\n", done.stdout)) == 2
    assert "measured on real samples, because src/mine.py:21, `self.log(" in done.stdout
    assert "validation_step, which calls self.log: a validation" in done.stdout
    (folder,) = tmp_path.glob("check-*")  # it is kept, for its logs
    assert f"its log: {folder}/ddp.log" in done.stdout


STRAYING = '''
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    """Its noise is each rank's own, and with fsdp its average stands still."""

    def __init__(self):
        super().__init__()
        self.layer, self.average = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0] + torch.randn_like(batch[0])).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.device_mesh is None:
            for average, weight in zip(self.average.parameters(), self.layer.parameters()):
                average.data = 0.9 * average.data + 0.1 * weight.data

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(128.0).reshape(32, 4) / 100), self.batch_size)
'''


@pytest.mark.soak
@pytest.mark.slow
def test_weights_that_differ_between_strategies_are_named(bake, tmp_path, monkeypatch):
    project: Path = bake(cluster="local")
    (project / "src/mine.py").write_text(STRAYING)
    (project / "configs/model/mine.yaml").write_text("_target_: mine.Module\n")
    (project / "configs/data/mine.yaml").write_text("_target_: mine.Data\nbatch_size: 4\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "tools/check.py", "model=mine", "data=mine"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"^fails  (.*) \(\d+ s\)$", done.stdout, re.MULTILINE) == ["the same weights with ddp and fsdp"]
    assert "fsdp ends with other weights than ddp: average." in done.stdout
    assert re.search(r"one process ends with other weights: layer.\w+ and 3 others, by", done.stdout)
    assert "Each rank draws noise" in done.stdout


@pytest.mark.slow
def test_a_mistake_is_told_before_anything_runs(bake, tmp_path, monkeypatch):
    project: Path = bake(cluster="local")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for word, said in (
        ("strategy=fsdp", "must be left out"),
        ("trainer.max_epoch=3", "max_epoch"),
        ("model=min", "min"),
    ):
        done = subprocess.run([sys.executable, "tools/check.py", word], cwd=project, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("ConfigError: "), done.stdout + done.stderr
        assert said in done.stderr and not done.stdout and not any(tmp_path.iterdir()), done.stderr
