"""What a module lacks is named, what it has is not, and the page for researchers has each of these methods."""

from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from hpc.studies.unlocks import unlocks

PAGE = Path(__file__).parents[3] / "docs" / "bring-your-own.md"


class Least(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch).mean()


class Most(Least):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def validation_step(self, batch: torch.Tensor) -> None: ...
    def test_step(self, batch: torch.Tensor) -> None: ...
    def example_batch(self, num_examples: int) -> torch.Tensor: ...
    def tensor_parallel_plan(self) -> dict[str, object]: ...


class Data(L.LightningDataModule):
    def test_dataloader(self) -> DataLoader: ...
    def predict_dataloader(self) -> DataLoader: ...


def test_what_is_missing_is_named_and_what_is_there_is_not():
    named = [method for method, _ in unlocks(Least(), L.LightningDataModule())]
    assert [method.split()[0].strip(",").partition("(")[0] for method in named] == [
        "validation_step", "test_step", "predict_dataloader", "a", "tensor_parallel_plan", "example_batch",
    ]  # fmt: skip
    assert not list(unlocks(Most(), Data()))
    assert [method for method, _ in unlocks(Most(), L.LightningDataModule())] == [
        "test_dataloader, in the DataModule", "predict_dataloader, in the DataModule",
    ]  # fmt: skip


def test_page_for_researchers_has_each_method():
    text = PAGE.read_text()
    for method, _ in unlocks(Least(), L.LightningDataModule()):
        name = "list of layers" if method.startswith("a ") else method.split()[0].strip(",").partition("(")[0]
        assert name in text, name
