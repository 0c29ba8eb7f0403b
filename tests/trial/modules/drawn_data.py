"""Tiny data and schedules, for drawn.py: src/my_research/drawn_data.py of a baked project."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hpc.data.data_module import DataModule

FEATURES, CLASSES = 4, 3
SIZES = {"train": 0, "val": 1000, "other": 2000, "test": 3000}  # the number of a split's first sample


class Noisy(Dataset):
    """Samples with noise that is drawn anew on each access."""

    def __init__(self, samples: TensorDataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, number = self.samples[index]
        return inputs + 0.1 * torch.randn(inputs.shape), number


def samples(split: str, num: int) -> TensorDataset:
    """Return features and, as the target, the number of the sample."""
    first = SIZES[split]
    features = torch.randn(num, FEATURES, generator=torch.Generator().manual_seed(first))
    return TensorDataset(features, torch.arange(first, first + num))


class Data(DataModule):
    """A data module with the project's loaders."""

    def __init__(self, sizes: dict[str, int], noisy: bool = False, **loading: Any) -> None:
        super().__init__(**loading)
        self.sizes, self.noisy = sizes, noisy

    def dataset(self, split: str) -> Dataset:
        made = samples(split, self.sizes[split])
        return Noisy(made) if self.noisy and split == "train" else made

    def val_dataloader(self) -> Any:
        loaders = [self._eval_loader(split) for split in ("val", "other") if split in self.sizes]
        return loaders if len(loaders) > 1 else loaders[0]


class Stock(L.LightningDataModule):
    """A data module with plain DataLoaders, as in Lightning's examples."""

    def __init__(
        self, sizes: dict[str, int], global_batch_size: int, noisy: bool = False, shuffle: bool = True, **loading: Any
    ) -> None:
        super().__init__()
        self.sizes, self.noisy, self.shuffle, self.loading = sizes, noisy, shuffle, loading
        self.global_batch_size = global_batch_size

    def loader(self, split: str) -> DataLoader:
        trainer: Any = self.trainer
        shares = trainer.world_size * trainer.accumulate_grad_batches  # a schedule may have changed that by the test
        size = max(1, self.global_batch_size // shares)
        made = samples(split, self.sizes[split])
        dataset = Noisy(made) if self.noisy and split == "train" else made
        return DataLoader(dataset, batch_size=size, shuffle=self.shuffle and split == "train", **self.loading)

    def train_dataloader(self) -> DataLoader:
        return self.loader("train")

    def val_dataloader(self) -> Any:
        loaders = [self.loader(split) for split in ("val", "other") if split in self.sizes]
        return loaders if len(loaders) > 1 else loaders[0]

    def test_dataloader(self) -> DataLoader:
        return self.loader("test")


def schedule(optimizer: Any, name: str, config: Any = None, **options: Any) -> Any:
    """Return a scheduler by its name, composed of others if there are `parts`."""
    del config
    if "parts" in options:
        options["schedulers"] = [schedule(optimizer, **part) for part in options.pop("parts")]
        if name == "ChainedScheduler":
            return lr_scheduler.ChainedScheduler(**options)
    if name == "LambdaLR":
        return lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    return getattr(lr_scheduler, name)(optimizer, **options)
