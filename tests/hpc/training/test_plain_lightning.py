"""One process trains as a plain Trainer does: the same bits of weights, and the same metrics.

The loaders do not shuffle, as the order of a shuffled one is the only thing that is replaced.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from hpc.checkpoint import weights

# A stranger's research: batches that are dicts, a last batch that is smaller, metrics of each kind.
DATA = """
import lightning as L, torch
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanSquaredError

class Points(Dataset):
    def __init__(self, num, shift):
        self.inputs = torch.linspace(-1, 1, num, dtype=torch.float64)[:, None] + shift

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return {"x": self.inputs[index], "target": {"y": (3 * self.inputs[index]).sin()}, "name": f"point {index}"}

class Data(L.LightningDataModule):
    def __init__(self, **options):
        super().__init__()

    def train_dataloader(self):
        return DataLoader(Points(46, 0.0), batch_size=8)

    def val_dataloader(self):
        return [DataLoader(Points(13, 0.1), batch_size=4), DataLoader(Points(7, 0.2), batch_size=2)]

    def test_dataloader(self):
        return DataLoader(Points(11, 0.3), batch_size=4)
"""
MODULES = {
    "automatic": """
class Line(L.LightningModule):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(7)  # the shipped config has built a network before
        first, last = torch.nn.Linear(1, 8), torch.nn.Linear(8, 1)
        self.layers = torch.nn.Sequential(first, torch.nn.BatchNorm1d(8), torch.nn.Tanh(), last)
        self.error = MeanSquaredError()

    def step(self, batch):
        return (self.layers(batch["x"]) - batch["target"]["y"]).square().mean()

    def training_step(self, batch):
        loss = self.step(batch)
        self.log("fit", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "more": [loss.detach()]}

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val", self.step(batch))

    def test_step(self, batch, batch_idx):
        self.error(self.layers(batch["x"]), batch["target"]["y"])
        self.log("test_error", self.error)
        self.log("test_loss", self.step(batch), batch_size=len(batch["x"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
""",
    "manual": """
class Line(L.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(7)
        self.ahead, self.back = torch.nn.Linear(1, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = (self.back(self.ahead(batch["x"]).tanh()) - batch["target"]["y"]).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("fit", loss)

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def test_step(self, batch, batch_idx):
        self.log_dict({"test_loss": (self.back(self.ahead(batch["x"]).tanh()) - batch["target"]["y"]).square().mean()})

    def configure_optimizers(self):
        first, second = torch.optim.Adam(self.ahead.parameters(), 0.02), torch.optim.SGD(self.back.parameters(), 0.1)
        return [first, second], [torch.optim.lr_scheduler.ExponentialLR(first, 0.5)]
""",
}
TRAINER: dict[str, dict[str, Any]] = {
    "automatic": {"max_epochs": 3, "precision": "64-true", "accumulate_grad_batches": 4, "gradient_clip_val": 0.3},
    "manual": {"max_epochs": 3, "precision": "64-true"},
}
WORDS = [
    "checkpoint.monitor=null",
    "callbacks.progress=null",
    "callbacks.samples=null",
    "callbacks.monitor=null",
    "+trainer.enable_progress_bar=false",
    "trainer.accelerator=cpu",
]
SHIPPED = "from my_research import module\nfrom my_research.data import digits\n"
REPLACED = f"{SHIPPED}module.Classifier, digits.Digits = Line, Data"


@pytest.fixture
def one_thread():
    """Add numbers in the order in which the ranks of a test do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.usefixtures("one_thread")
def test_weights_and_metrics_are_those_of_a_plain_trainer(kind: str, start: Callable[..., str], tmp_path: Path) -> None:
    code = DATA + MODULES[kind]
    options = {"gradient_clip_val": "null"} | TRAINER[kind]
    words = [f"trainer.{key}={value}" for key, value in options.items()]
    output = start(tmp_path / "run", 1, [*WORDS, *words], patch=code + REPLACED)
    tested = dict(line.split() for line in output.splitlines() if line.startswith("test_"))

    names: dict[str, Any] = {}
    exec(code, names)
    data, module = names["Data"](), names["Line"]()
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **TRAINER[kind])
    trainer.fit(module, data)
    (metrics,) = trainer.test(module, data)
    found = weights.read(tmp_path / "run/checkpoints/last.ckpt")
    assert found.keys() == module.state_dict().keys()
    for name, value in module.state_dict().items():
        assert torch.equal(found[name], value), name
    assert tested == {name: f"{value:.4f}" for name, value in metrics.items()}
