"""The batches with which a training step is traced: of the module itself, or made of the first samples of the data."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hpc.data.batch_contents import iterate_tensors, measure_batch
from hpc.data.data_module import DataModule
from hpc.privates.torch import tree_map, unset_fake_temporarily
from hpc.training.dry_run import DryRunTrainer, explain
from hpc.training.fake_tensors import fake_copy, fake_tensor_mode

NUM_SAMPLES = 8  # that are looked at
SMALL_BATCH = 5  # samples of a batch of our own data modules


class UnreadableData(Exception):
    """The data cannot be read on this machine; the message says why."""


@dataclass(frozen=True)
class ExampleBatch:
    """A batch and its tensors."""

    batch: Any
    tensors: list[Tensor]


class ExampleBatches:
    """Batches of any number of samples: `module.example_batch(num_examples)` if the module has it, else of the data.

    Of the data, a batch repeats one sample, so that its costs are linear in their number. If samples differ in size, it
    is the largest of the first ones. A loader that is given whole batches yields one, whose shapes are changed.

    Args:
        make_data: returns the data module; it is called only if the module has no example.

    Attributes:
        note: what a reader of the plan must know of the samples; empty for nothing.
        loader_batch_size: of the loader on one rank; None if it is unknown.
        loader_divides_by_ranks: whether the data's class divides the batch size that it is given by the ranks.
    """

    def __init__(self, make_data: Callable[[], L.LightningDataModule] | None = None) -> None:
        self.make_data = make_data
        self.note = ""
        self.loader_batch_size: int | None = None
        self.loader_divides_by_ranks = False
        self.trainer = DryRunTrainer()

    def make(
        self, module: L.LightningModule, num_examples: int, *, dtype: torch.dtype | None, is_real: bool = False
    ) -> ExampleBatch:
        """Return a batch of fake tensors, or of real ones. To be called within the mode of such tensors.

        Args:
            dtype: to which Lightning converts floating-point numbers; None: it does not.

        Raises:
            UnreadableData
        """
        example_batch: Any = getattr(module, "example_batch", None)
        batch = example_batch(num_examples) if example_batch else None
        batch = self._of_data(num_examples) if batch is None else batch
        size = measure_batch(batch)
        num_samples = size.num_samples if size else None

        def change(tensor: Tensor) -> dict[str, Any]:
            is_resized = tensor.ndim > 0 and len(tensor) == num_samples
            changed: dict[str, Any] = {"size": (num_examples, *tensor.shape[1:])} if is_resized else {}
            return changed | ({"dtype": dtype} if dtype and tensor.is_floating_point() else {})

        if is_real:
            batch = apply_to_collection(batch, Tensor, lambda tensor: _real_copy(tensor, **change(tensor)))
            return ExampleBatch(batch, list(iterate_tensors(batch)))
        tensors: list[Tensor] = []
        return ExampleBatch(fake_copy(batch, change, copies=tensors), tensors)

    def _of_data(self, num_examples: int) -> Any:
        try:
            with unset_fake_temporarily():
                batch = tree_map(lambda loader: self._batch(loader, num_examples), self._loaders)
                for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
                    batch = getattr(self._data, hook)(batch, 0) if is_overridden(hook, self._data) else batch
                return batch
        except Exception as error:
            raise UnreadableData(f"no batch of the data can be made here: {explain(error)}") from error

    @cached_property
    def _data(self) -> L.LightningDataModule:
        if self.make_data is None:
            raise UnreadableData("neither the module has example_batch(num_examples), nor are there data")
        return self._set_up(self.make_data())

    def _set_up(self, data: L.LightningDataModule) -> L.LightningDataModule:
        if isinstance(data, DataModule):
            data.global_batch_size = SMALL_BATCH  # its loaders read whole batches
        data.trainer = self.trainer
        self.trainer.datamodule = data
        data.setup("fit")
        return data

    @cached_property
    def _loaders(self) -> Any:
        self.trainer.was_asked_for_ranks = False
        loaders = self._data.train_dataloader()
        if self.trainer.was_asked_for_ranks and isinstance(loaders, DataLoader):
            size = loaders.batch_size or 0
            self.loader_divides_by_ranks = 0 < self._batch_size_on_one_of_two() == size // 2
        return loaders.iterables if isinstance(loaders, CombinedLoader) else loaders

    def _batch_size_on_one_of_two(self) -> int:
        """Return the batch size of the loader that the data's class makes on two ranks; 0 if it makes none there."""
        self.trainer.told_ranks = 2
        try:
            loader: Any = self._set_up(self.make_data()).train_dataloader() if self.make_data else None
            return getattr(loader, "batch_size", None) or 0
        except Exception:  # the researcher's code: two ranks do not divide a batch, for example
            return 0
        finally:
            self.trainer.told_ranks = 1

    def _batch(self, loader: Any, num_examples: int) -> Any:
        """Return a batch of a loader: of so many samples, unless the loader is given whole batches."""
        if not isinstance(loader, DataLoader):
            return self._whole_batch(next(iter(loader)))
        if loader.batch_sampler is None:
            is_stream = isinstance(loader.dataset, IterableDataset)
            batch = next(iter(loader.dataset if is_stream else loader.sampler))
            return self._whole_batch(loader.collate_fn(batch if is_stream else loader.dataset[batch]))
        self.loader_batch_size = getattr(loader.batch_sampler, "batch_size", None)
        sample = self._sample(loader)
        return loader.collate_fn([deepcopy(sample) for _ in range(num_examples)])

    def _whole_batch(self, batch: Any) -> Any:
        size = measure_batch(batch)
        self.loader_batch_size = size.num_samples if size and not isinstance(self._data, DataModule) else None
        return batch

    def _sample(self, loader: Any) -> Any:
        """Return one of the first samples, the largest; note if they differ in size."""
        dataset = loader.dataset
        if isinstance(dataset, IterableDataset):
            samples = list(islice(iter(dataset), NUM_SAMPLES))
        else:
            samples = [dataset[index] for index in range(min(NUM_SAMPLES, len(dataset)))]
        sizes = [_num_numbers(loader.collate_fn([deepcopy(sample)])) for sample in samples]
        if len(set(sizes)) > 1:
            self.note = f"samples differ in size; planned with the largest of the first {len(samples)}"
        return samples[sizes.index(max(sizes))]


def _real_copy(tensor: Tensor, size: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of this size and type, which repeats samples or leaves some out."""
    resized = tensor if size is None else tensor[torch.arange(size[0]) % len(tensor)]
    return resized.to(dtype or tensor.dtype)


def _num_numbers(batch: Any) -> int:
    """Return how many numbers the tensors of a batch hold."""
    tensors: list[Tensor] = []
    with fake_tensor_mode():
        fake_copy(batch, copies=tensors)
    return sum(tensor.numel() for tensor in tensors)
