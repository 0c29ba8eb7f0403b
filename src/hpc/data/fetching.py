"""Batches as a loader fetches them: whole, with the random numbers of their samples, and ahead of a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from hpc.config.errors import ConfigError
from hpc.data.prefetch import prefetch
from hpc.data.sample_randomness import fetches_together
from hpc.data.sampler import sample_seeds
from hpc.state import randomness


class BatchLoader(DataLoader):
    """A loader of whole batches. Without worker processes this process fetches them, without the loader's overhead.

    A thread may then fetch and pin batches ahead, so that a GPU does not wait. It is not used on a CPU, where it would
    take the cores that training needs, nor for a dataset that draws random numbers, as training draws them, too.
    """

    num_ahead = 0  # batches that a thread fetches ahead
    device = 0  # the GPU that the batches are for

    def __iter__(self) -> Any:
        if self.num_workers:
            return super().__iter__()
        return prefetch(self._batches(), self.num_ahead) if self.num_ahead else self._batches()

    def _batches(self) -> Iterator[Any]:
        pins = self.pin_memory and torch.cuda.is_available()
        if self.num_ahead and pins:
            torch.cuda.set_device(self.device)  # a new thread would pin memory for the first GPU of the node
        for epoch_and_indices in self.sampler:
            batch = self.dataset[epoch_and_indices]
            yield tuple(tensor.pin_memory() for tensor in batch) if pins and isinstance(batch, tuple) else batch


class IndexedDataset(Dataset):
    """A dataset that is indexed by (epoch, indices) and returns (inputs, targets, indices).

    A `ConfigError` is returned, not raised: a DataLoader worker would turn it into a RuntimeError with another message.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.draws = getattr(dataset, "draws", not isinstance(dataset, TensorDataset))  # random numbers

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, batch: tuple[int, np.ndarray]) -> tuple[Tensor, Tensor, Tensor] | ConfigError:
        epoch, indices = batch
        try:
            inputs, targets = self._samples(epoch, indices)
        except ConfigError as error:
            return error
        return inputs, targets, torch.from_numpy(indices)

    def _samples(self, epoch: int, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        if isinstance(self.dataset, TensorDataset):
            inputs, targets = self.dataset[torch.from_numpy(indices)]
            return inputs, targets
        if not self.draws:
            return self.dataset.__getitems__(indices)
        index_list = indices.tolist()
        with nullcontext() if get_worker_info() else isolate_rng(include_cuda=False):
            return self._samples_with_draws(index_list, sample_seeds(self.seed, epoch, indices=index_list))

    def _samples_with_draws(self, indices: list[int], seeds: list[int]) -> tuple[Tensor, Tensor]:
        if fetches_together(self.dataset):
            randomness.seed_host(seeds[0])
            return self.dataset.__getitems__(indices)
        samples = [self._sample(index, seed) for index, seed in zip(indices, seeds, strict=True)]
        inputs = torch.stack([torch.as_tensor(sample[0]) for sample in samples])
        return inputs, torch.stack([torch.as_tensor(sample[1]) for sample in samples])

    def _sample(self, index: int, seed: int) -> Any:
        randomness.seed_host(seed)
        return self.dataset[index]


def empty_batch(shape: Sequence[int], dtype: type[np.generic]) -> Tensor:
    """Return an uninitialized tensor for a batch; pinned if this process sends it to a GPU, which saves a copy."""
    if _has_gpu() and get_worker_info() is None:
        return torch.empty(tuple(shape), dtype=getattr(torch, dtype.__name__), pin_memory=True)
    return torch.from_numpy(np.empty(shape, dtype))  # numpy allocates in huge pages, unlike torch


def copy_to_tensor(array: np.ndarray, dtype: type[np.generic]) -> Tensor:
    """Return a copy of an array, in an `empty_batch`."""
    if not _has_gpu() or get_worker_info():
        return torch.from_numpy(array.astype(dtype))
    tensor = empty_batch(array.shape, dtype)
    tensor.numpy()[...] = array
    return tensor


_has_gpu = cache(torch.cuda.is_available)
