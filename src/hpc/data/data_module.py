"""From a dataset to batches on the device: the same samples in the same global order in every layout."""

import os
from collections.abc import Sequence
from copy import copy
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from hpc.config.errors import ConfigError
from hpc.data.batch_parts import TrainingRanges, batch_ranges
from hpc.data.fetching import BatchLoader, IndexedDataset
from hpc.data.file_checks import reject_few_samples, reject_large_batch
from hpc.data.image_files import SPLITS
from hpc.data.position import accumulation_schedule
from hpc.data.rank_steps import DataRank, data_rank_and_size
from hpc.data.sample_order import ARRAYS, SampleOrder
from hpc.launch import placement
from hpc.run.signals import block_signals_in_worker
from hpc.state.randomness import uniform_per_sample


class DataModule(L.LightningDataModule):
    """Base class for a researcher's data. A subclass implements `dataset(split)` and, optionally, `augment`.

    A dataset is indexed by one int and returns (input, target). If it also has `__getitems__(indices)`, that returns
    the stacked (inputs, targets) of many indices at once, which is faster. Random numbers of torch, numpy or Python
    that a dataset draws are a function of (seed, epoch, place of the sample in the epoch), or in `__getitems__` of the
    first place; a resumed run draws the same ones. A dataset that draws none sets `draws = False` and has
    `__getitems__` for an int64 array. That is faster again: a thread may fetch its batches ahead.

    Args:
        num_workers: processes that fetch batches; null: one less than the cores of this process. Samples that are
            gathered from memory are faster without.
        num_ahead: batches that a thread fetches ahead for a GPU if there are no workers; 0: none.
    """

    num_draws = 0  # random numbers per sample that `augment` needs

    def __init__(
        self,
        *,
        global_batch_size: int,
        seed: int = 1,
        num_workers: int | None = 0,
        num_ahead: int = 2,
    ) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.num_ahead = num_ahead
        self._datasets: dict[str, IndexedDataset] = {}
        self._has_noted_test_split = False

    def dataset(self, split: str) -> Dataset:
        """Return the samples of "train", "val" or "test"."""
        raise NotImplementedError

    def augment(self, inputs: Tensor, draws: Tensor) -> Tensor:
        """Return training inputs with random changes, on their device.

        `draws`: uniform in [0, 1), shape (batch, num_draws), a function of (seed, epoch, sample index).
        """
        return inputs

    def prepare_inputs(self, inputs: Tensor) -> Tensor:
        """Return inputs of any split as the network needs them, on their device, after `augment` (uint8 → float)."""
        return inputs

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """Return plain data by which a resumed run recognizes the data of each split."""
        return {split: {"samples": len(self._indexed_dataset(split)), **self.describe(split)} for split in SPLITS}

    def describe(self, split: str) -> dict[str, Any]:
        """Return plain data that identify the samples of a split, wherever their files lie; their number is added."""
        return {}

    def train_dataloader(self) -> DataLoader:
        dataset = self._indexed_dataset("train")
        reject_large_batch(self.global_batch_size, len(dataset))
        for split in ("val", "test"):  # before training, not after it
            reject_few_samples(split, len(self._indexed_dataset(split)), num_ranks=self._data_rank()["num_ranks"])
        self._note_missing_test_split()
        batch_size, place = self._micro_batch_size(), self._data_rank()
        num_steps = len(dataset) // self.global_batch_size  # an incomplete last batch is left out
        num_samples = num_steps * self._micro_batches_per_step() * place["num_ranks"] * batch_size
        parts, samples = TrainingRanges(num_samples, batch_size, **place), RandomSampler(range(len(dataset)))
        repeats = getattr(self.trainer, "overfit_batches", 0) > 0
        return self._make_loader(dataset, samples, parts, batch_size=batch_size, repeats_first_epoch=repeats, **place)

    def val_dataloader(self) -> DataLoader:
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader:
        self._note_missing_test_split()
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader:
        """Return the samples of `task=predict`: those of the test, unless a subclass returns others."""
        return self._eval_loader("test")

    def on_after_batch_transfer(
        self, batch: tuple[Tensor, Tensor, Tensor] | ConfigError, dataloader_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) as the LightningModule gets them, from (inputs, targets, indices) as loaded."""
        if isinstance(batch, ConfigError):
            raise copy(batch)  # a copy: an error that this frame holds would live on, and keep the workers alive
        inputs, targets, indices = batch
        if self.num_draws and self.trainer is not None and self.trainer.training:
            inputs = self.augment(
                inputs, uniform_per_sample(self.seed, self.trainer.current_epoch, indices=indices, num=self.num_draws)
            )
        inputs = self.prepare_inputs(inputs)
        if self.trainer is not None:  # Lightning converts before the transfer, when images are still uint8
            inputs = self.trainer.precision_plugin.convert_input(inputs)
        return inputs, targets

    def _note_missing_test_split(self) -> None:
        """Print once that the test evaluates the samples of validation, if it does."""
        if self._has_noted_test_split or self.trainer is None or not self.trainer.is_global_zero:
            return
        self._has_noted_test_split = True
        if (test := self.describe("test")) and test == self.describe("val"):
            print("note: the data have no test split: the test evaluates the samples of validation again", flush=True)

    def _indexed_dataset(self, split: str) -> IndexedDataset:
        if split not in self._datasets:
            self._datasets[split] = IndexedDataset(self.dataset(split), self.seed)
        return self._datasets[split]

    def _eval_loader(self, split: str) -> DataLoader:
        dataset, place = self._indexed_dataset(split), self._data_rank()
        batch_size, samples = self._micro_batch_size(), SequentialSampler(range(len(dataset)))
        parts = batch_ranges(len(dataset), batch_size, **place)
        return self._make_loader(dataset, samples, parts, batch_size=batch_size, **place)

    def _make_loader(self, dataset: IndexedDataset, samples: Any, parts: Sequence[range], **order: Any) -> DataLoader:
        num_workers = self._num_workers()
        # The sampler yields whole batches of indices, so automatic batching is off (batch_size=None).
        loader = BatchLoader(
            dataset,
            sampler=SampleOrder(samples, parts, seed=self.seed, gives=ARRAYS, **order),
            batch_size=None,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=num_workers > 0,
            worker_init_fn=block_signals_in_worker,  # the scheduler's warnings are for the ranks
            # Each iterator draws a seed for its workers, and a resumed run makes more iterators. So they draw from a
            # generator of their own, and not from the one that training draws from.
            generator=torch.Generator().manual_seed(self.seed),
        )
        if not (num_workers or dataset.draws) and torch.cuda.is_available():
            loader.num_ahead, loader.device = self.num_ahead, torch.cuda.current_device()
        return loader

    def _num_workers(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        num_ranks = self.trainer.num_devices if self.trainer is not None else 1
        return max(1, placement.num_usable_cores(num_ranks, os.environ) - 1)

    def _micro_batch_size(self) -> int:
        return max(1, self.global_batch_size // (self._data_rank()["num_ranks"] * self._micro_batches_per_step()))

    def _micro_batches_per_step(self) -> int:
        """Return the number of micro-batches in a global batch. A schedule accumulates whole global batches: 1."""
        if self.trainer is None or accumulation_schedule(self.trainer):
            return 1  # beside a schedule, Lightning requires accumulate_grad_batches=1
        return self.trainer.accumulate_grad_batches

    def _data_rank(self) -> DataRank:
        """Return this process's rank among those that get different samples (tensor-parallel ranks share theirs)."""
        return data_rank_and_size(self.trainer.strategy) if self.trainer is not None else {"rank": 0, "num_ranks": 1}


def warp_images(images: Tensor, theta: Tensor) -> Tensor:
    """Resample images (bilinear, zeros outside) at the places to which an affine map sends each output pixel.

    Args:
        images: (batch, channels, height, width), any dtype.
        theta: (batch, 2, 3), rows x and y, from and to coordinates that run from -1 to 1 between the images' edges.

    Returns:
        float32, shaped like `images`.
    """
    height, width = images.shape[-2:]
    x = (torch.arange(width, device=images.device) * 2 + 1) / width - 1
    y = (torch.arange(height, device=images.device) * 2 + 1)[:, None] / height - 1
    # Not with affine_grid: it multiplies matrices, which TF32 rounds by a tenth of a pixel, and the batch size matters.
    (a, b, c), (d, e, f) = (row[:, :, None, None].unbind(1) for row in theta.unbind(1))
    grid = torch.stack([a * x + b * y + c, d * x + e * y + f], dim=-1)
    return F.grid_sample(images.float(), grid, align_corners=False)
