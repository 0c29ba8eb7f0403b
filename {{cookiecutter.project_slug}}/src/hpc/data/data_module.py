"""From a dataset to batches on the device: the same samples in the same global order in every layout."""

import os
from copy import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hpc.config.errors import ConfigError
from hpc.data import staging
from hpc.data.fetching import BatchLoader, IndexedDataset
from hpc.data.file_checks import reject_few_samples, reject_large_batch
from hpc.data.file_parts import FileParts
from hpc.data.image_files import SPLITS
from hpc.data.sampler import EvalBatchSampler, GlobalBatchSampler, RepeatedBatchSampler, uniform_per_sample
from hpc.data.shared_loaders import data_rank
from hpc.launch import placement
from hpc.run.signals import block_signals_in_worker


class DataModule(L.LightningDataModule):
    """What every dataset of this project shares. A subclass gives `dataset(split)` and, if it likes, `augment`.

    A dataset is indexed by one int and returns (input, target); `__getitems__(indices)`, if there is one, returns the
    stacked (inputs, targets) of many at once, which is faster. Random numbers of torch, numpy or Python that it draws
    are a function of (seed, epoch, sample index), in `__getitems__` of the first index: also in a run that goes on.
    A dataset that draws none says so (`draws = False`) and has `__getitems__` of an int64 array, which is faster again:
    a thread may fetch its batches ahead.

    Args:
        num_workers: processes that fetch; null: as many as this process has cores, but for one. What is gathered from
            memory is faster without.
        num_ahead: batches that a thread fetches ahead for a GPU, where there are no workers; 0: none.
        stage: copy the files of `files_to_stage` to `node_local` before training.
        node_local: a folder on the node, as bash reads it.
    """

    num_draws = 0  # random numbers per sample that `augment` wants

    def __init__(
        self,
        *,
        global_batch_size: int,
        seed: int = 1,
        num_workers: int | None = 0,
        num_ahead: int = 2,
        stage: bool = False,
        node_local: str | None = None,
    ) -> None:
        super().__init__()
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.num_workers = num_workers
        self.num_ahead = num_ahead
        self.stage, self.node_local = stage, node_local
        self._splits: dict[str, IndexedDataset] = {}
        self._told = False

    def dataset(self, split: str) -> Dataset:
        """The samples of "train", "val" or "test"."""
        raise NotImplementedError

    def augment(self, inputs: Tensor, draws: Tensor) -> Tensor:
        """Training inputs changed at random, on their device.

        `draws`: uniform in [0, 1), shape (batch, num_draws), a function of (seed, epoch, sample index).
        """
        return inputs

    def prepare_inputs(self, inputs: Tensor) -> Tensor:
        """Inputs as the network wants them, on their device (uint8 → float, say). After `augment`, in every split."""
        return inputs

    def files_to_stage(self) -> list[FileParts]:
        """The packed files that can be copied to the node."""
        raise ConfigError(
            "data.stage", True, "copies files that tools/pack.py made", "data.stage=false, or data=packed"
        )

    def fingerprint(self) -> dict[str, dict[str, Any]]:
        """By what the data of each split are known again when a run goes on; plain data."""
        return {split: {"samples": len(self._split(split)), **self.describe(split)} for split in SPLITS}

    def describe(self, split: str) -> dict[str, Any]:
        """What else than their number tells the samples of a split from others, wherever they lie; plain data."""
        return {}

    def prepare_data(self) -> None:
        """Lightning calls this in one process per node, and the others wait for as long as it takes."""
        for parts in self.files_to_stage() if self.stage else ():
            staging.reject_missing_folder(self.stage, self.node_local)
            staging.stage_file(parts, str(self.node_local))

    def local_path(self, parts: FileParts) -> str:
        """The file itself, or its copy on this node."""
        return staging.copy_path(parts, self.node_local) if self.stage and self.node_local else parts.file

    def train_dataloader(self) -> DataLoader:
        dataset = self._split("train")
        reject_large_batch(self.global_batch_size, len(dataset))
        for split in ("val", "test"):  # before training, not after it
            reject_few_samples(split, len(self._split(split)), num_ranks=self._place()["num_ranks"])
        self._tell_one_for_both()
        overfits = getattr(self.trainer, "overfit_batches", 0) > 0
        sampler = (RepeatedBatchSampler if overfits else GlobalBatchSampler)(
            len(dataset), self.global_batch_size, accumulate=self._accumulate(), seed=self.seed, **self._place()
        )
        return self._loader(dataset, sampler)

    def val_dataloader(self) -> DataLoader:
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader:
        self._tell_one_for_both()
        return self._eval_loader("test")

    def on_after_batch_transfer(
        self, batch: tuple[Tensor, Tensor, Tensor] | ConfigError, dataloader_idx: int
    ) -> tuple[Tensor, Tensor]:
        """(inputs, targets, indices) as loaded → (inputs, targets) as the LightningModule sees them."""
        if isinstance(
            batch, ConfigError
        ):  # raised anew: one that this frame held would live on, and the workers with it
            raise copy(batch)
        inputs, targets, indices = batch
        if self.num_draws and self.trainer is not None and self.trainer.training:
            inputs = self.augment(
                inputs, uniform_per_sample(self.seed, self.trainer.current_epoch, indices=indices, num=self.num_draws)
            )
        inputs = self.prepare_inputs(inputs)
        if self.trainer is not None:  # Lightning converts before the transfer, when images are still uint8
            inputs = self.trainer.precision_plugin.convert_input(inputs)
        return inputs, targets

    def _tell_one_for_both(self) -> None:
        if self._told or self.trainer is None or not self.trainer.is_global_zero:
            return
        self._told = True
        if (test := self.describe("test")) and test == self.describe("val"):
            print("note: there are no samples for test alone: it evaluates those of validation once more", flush=True)

    def _split(self, split: str) -> IndexedDataset:
        if split not in self._splits:
            self._splits[split] = IndexedDataset(self.dataset(split), self.seed)
        return self._splits[split]

    def _eval_loader(self, split: str) -> DataLoader:
        dataset, place = self._split(split), self._place()
        batch_size = max(1, self.global_batch_size // (place["num_ranks"] * self._accumulate()))
        return self._loader(dataset, EvalBatchSampler(len(dataset), batch_size, **place))

    def _loader(self, dataset: "Indexed", sampler: Any) -> DataLoader:
        workers = self._num_workers()
        # The sampler yields whole batches of indices, so automatic batching is off (batch_size=None).
        loader = BatchLoader(
            dataset,
            sampler=sampler,
            batch_size=None,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
            worker_init_fn=block_signals_in_worker,  # warnings are for the ranks
            # An iterator draws a seed for its workers, and a resumed run makes other iterators: not from what
            # training draws its numbers from.
            generator=torch.Generator().manual_seed(self.seed),
        )
        if not (workers or dataset.draws) and torch.cuda.is_available():
            loader.num_ahead, loader.device = self.num_ahead, torch.cuda.current_device()
        return loader

    def _num_workers(self) -> int:
        if self.num_workers is not None:
            return self.num_workers
        ranks = self.trainer.num_devices if self.trainer is not None else 1
        return max(1, placement.num_usable_cores(ranks, os.environ) - 1)

    def _accumulate(self) -> int:
        """Micro-batches that a global batch is cut into. A schedule of accumulation adds up whole global batches."""
        callbacks = getattr(self.trainer, "callbacks", [])
        if any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks):
            return 1  # as Lightning wants accumulate_grad_batches to be beside it
        return self.trainer.accumulate_grad_batches if self.trainer is not None else 1

    def _place(self) -> dict[str, int]:
        """This process among those that get different samples (tensor-parallel ranks share theirs)."""
        return data_rank(self.trainer.strategy) if self.trainer is not None else {"rank": 0, "num_ranks": 1}


def warp_images(images: Tensor, theta: Tensor) -> Tensor:
    """Images resampled (bilinear, zeros outside) where an affine map sends each pixel of the result.

    Args:
        images: (batch, channels, height, width), any dtype.
        theta: (batch, 2, 3), rows x and y, from and to coordinates that run from -1 to 1 between the images' edges.

    Returns:
        float32, shaped like `images`.
    """
    height, width = images.shape[-2:]
    x = (torch.arange(width, device=images.device) * 2 + 1) / width - 1
    y = (torch.arange(height, device=images.device) * 2 + 1)[:, None] / height - 1
    # By hand: affine_grid multiplies matrices, which TF32 rounds by a tenth of a pixel and a batch's size may change.
    (a, b, c), (d, e, f) = (row[:, :, None, None].unbind(1) for row in theta.unbind(1))
    grid = torch.stack([a * x + b * y + c, d * x + e * y + f], dim=-1)
    return F.grid_sample(images.float(), grid, align_corners=False)
