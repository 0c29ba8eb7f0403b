"""Batches as a loader fetches them: whole, with the random numbers of their samples, and ahead of a GPU."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from hpc.config.errors import ConfigError
from hpc.data.sample_order import EpochIndex
from hpc.data.sample_randomness import SeededSamples, as_it_is, fetches_together

END = object()


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
        for indices in self.sampler:
            batch = self.dataset[indices]
            yield tuple(tensor.pin_memory() for tensor in batch) if pins and isinstance(batch, tuple) else batch


class IndexedDataset(Dataset):
    """A dataset that is indexed by an `EpochIndex` of an array and returns (inputs, targets, indices).

    A `ConfigError` is returned, not raised: a DataLoader worker would turn it into a RuntimeError with another message.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.draws = getattr(dataset, "draws", not isinstance(dataset, TensorDataset))  # random numbers
        collate = as_it_is if fetches_together(dataset) else _stack
        self.seeded = SeededSamples(dataset, collate, seed=seed) if self.draws else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, batch: EpochIndex) -> tuple[Tensor, Tensor, Tensor] | ConfigError:
        try:
            inputs, targets = self._samples(batch)
        except ConfigError as error:
            return error
        return inputs, targets, torch.from_numpy(batch.index)

    def _samples(self, batch: EpochIndex) -> tuple[Tensor, Tensor]:
        if self.seeded is not None:
            places = range(batch.place, batch.place + len(batch.index))
            return self.seeded.fetch(batch.epoch, batch.index.tolist(), places=places)
        if isinstance(self.dataset, TensorDataset):
            inputs, targets = self.dataset[torch.from_numpy(batch.index)]
            return inputs, targets
        return self.dataset.__getitems__(batch.index)


def _stack(samples: list[Any]) -> tuple[Tensor, Tensor]:
    inputs = torch.stack([torch.as_tensor(sample[0]) for sample in samples])
    return inputs, torch.stack([torch.as_tensor(sample[1]) for sample in samples])


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


def prefetch(batches: Iterable[Any], num: int) -> Iterator[Any]:
    """Yield the same batches in the same order, while up to `num` more wait in a queue. Raise what fetching raises."""
    fetched: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(num)
    stop = threading.Event()
    thread = threading.Thread(target=_fetch, args=(batches, fetched, stop), daemon=True, name="prefetch batches")
    thread.start()
    try:
        while True:
            batch, error = fetched.get()
            if error is not None:
                raise error
            if batch is END:
                return
            yield batch
    finally:  # also when an epoch is left in the middle
        stop.set()
        while thread.is_alive():
            _empty(fetched)
            thread.join(0.01)


def _fetch(batches: Iterable[Any], fetched: queue.Queue[Any], stop: threading.Event) -> None:
    try:
        for batch in batches:
            fetched.put((batch, None))
            if stop.is_set():
                return
        fetched.put((END, None))
    except BaseException as error:
        fetched.put((None, error))


def _empty(fetched: queue.Queue[Any]) -> None:
    try:
        while True:
            fetched.get_nowait()
    except queue.Empty:
        pass
