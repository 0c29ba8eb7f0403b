"""Train code of other people, unedited: Lightning's other name, loaders of the module, an optimizer of its own kind."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpc.checkpoint import weights

pytestmark = pytest.mark.slow

LINE = '''
import pathlib
from typing import Optional

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, file):
        self.file = file

    def __len__(self):
        return 40

    def __getitem__(self, index):
        shift = torch.load(self.file, weights_only=False)["shift"]  # the author's own pickle, in a worker
        return torch.tensor([index / 40, 1.0]), torch.tensor([index % 3 + float(shift.name)])


def registered(kind):
    return kind


class Base(pl.LightningModule):
    def __init__(self, cfg, shape: tuple, width: int = None, file: str = "", **unused):
        super().__init__()
        assert cfg.layer.names[0] == "a" and shape == (1, 2) and width is None
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(cfg.layer.inputs, 1, dtype=torch.float64)
        self.file, self.rate = file, cfg.rate

    def setup(self, stage):
        if self.trainer.is_global_zero and not pathlib.Path(self.file).exists():
            torch.save({"shift": pathlib.PurePosixPath("2")}, self.file)
        self.trainer.strategy.barrier()

    def training_step(self, batch, batch_idx):
        inputs, targets = (tensor.double() for tensor in batch)
        return (self.layer(inputs) - targets).square().mean()

    def train_dataloader(self):
        return DataLoader(Points(self.file), batch_size=4, shuffle=True, num_workers=1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["table"], checkpoint["best"] = np.arange(3.0), np.float32(0.5)

    def on_load_checkpoint(self, checkpoint):
        assert isinstance(checkpoint["table"], np.ndarray) and type(checkpoint["best"]) is np.float32


@registered
class Line(Base):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=self.rate, max_iter=2, history_size=3)


class Around(torch.optim.SGD):
    """Keeps slow weights beside the state of SGD."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = super().step(closure)
        with torch.no_grad():
            for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"])):
                p.copy_(slow.lerp_(p, 0.5))
        return loss

    def state_dict(self):
        return super().state_dict() | {"slow": self.slow}

    def load_state_dict(self, state):
        self.slow = [tensor.clone() for tensor in state["slow"]]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


@registered
class Slow(Base):
    def configure_optimizers(self):
        return Around(self.parameters(), self.rate)

    def on_train_batch_start(self, batch, batch_idx):
        if not hasattr(self, "player"):
            self.player = (number for number in range(1000))  # for an object of another library, such as a game
        next(self.player)
'''
MODEL = """
_target_: foreign_line.KIND
file: FOLDER/own.pt
shape: {_target_: builtins.tuple, _args_: [[1, 2]]}
width: null
cfg: {layer: {inputs: 2, names: [a, b]}, rate: 0.05}
"""
WORDS = ["trainer.accelerator=cpu", "trainer.precision=32-true", "trainer.max_epochs=2", "checkpoint.monitor=null"]
WORDS += ["callbacks.progress=null", "callbacks.monitor=null", "callbacks.samples=null", "data=none"]
RANKS = {1: ["trainer.devices=1"], 2: ["trainer.devices=2", "strategy=ddp"]}
PATCH = """
import sys; sys.path.insert(0, {folder!r})
from hpc.config import trust
trust.trusted_packages = lambda: ("hpc", "my_research", "torch.optim", "lightning", "foreign_line")
trust.TRUSTED_FILE = trust.Path("configs/trusted.yaml")
"""


@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("Line", 1), pytest.param("Slow", 2), pytest.param("Line", 2, marks=pytest.mark.soak)]
)
def test_it_trains_and_resumes_exactly(kind: str, num_ranks: int, start: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "foreign_line.py").write_text(LINE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/foreign.yaml").write_text(MODEL.replace("KIND", kind).replace("FOLDER", str(tmp_path)))
    patch = PATCH.format(folder=str(tmp_path))
    words = [*WORDS, *RANKS[num_ranks], f"hydra.searchpath=['file://{tmp_path}']", "model=foreign"]
    said = start(tmp_path / "whole", num_ranks, words, patch=patch)
    assert "Traceback" not in said and "hyperparameters that are no plain data" not in said
    start(tmp_path / "run", num_ranks, words, 3, patch)
    resumed = start(tmp_path / "run", num_ranks, [], patch=patch)
    whole, again = (weights.read(tmp_path / name / "checkpoints/last.ckpt") for name in ("whole", "run"))
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    for lost in (said, resumed):  # at the first save, not only when it is resumed
        assert bool(re.search("warning: .* start anew in a resumed run.*: player", lost)) is (kind == "Slow")
