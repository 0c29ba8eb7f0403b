"""Random numbers of samples, drawn in any library, as a function of (seed, epoch, place in the epoch's order).

So they are the same in every layout and after a resume, and no batch must be fetched again to find them.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, get_worker_info

from hpc.data.rank_samplers import EpochIndex, EpochIndices
from hpc.data.sampler import sample_seeds
from hpc.run.signals import block_signals_in_worker
from hpc.state import plain_forms, randomness

MAX_ENTRIES = 1000  # of a container that are looked at; a longer one holds samples
SIMPLE = (bool, int, float, str, bytes, type(None), Tensor, np.ndarray)
# Objects that know the whole run.
NOT_SEARCHED = (*SIMPLE, type, ModuleType, L.Trainer, L.LightningModule, L.LightningDataModule, L.Callback)
FIELD = "_seeds_samples"  # of a loader whose samples have random numbers of their own


class SeededSamples(Dataset):
    """A dataset that is indexed by the indices of a batch, and seeds the host's generators before each sample.

    A dataset that fetches many samples at once is seeded once for them all.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return the sample of one index: for `__getitems__`, or for a loader that makes no batches."""
        if isinstance(index, EpochIndex):
            with _isolated():
                return self._sample(index.index, *sample_seeds(self.seed, index.epoch, indices=[index.place]))
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"in sample {index} of {type(self.dataset).__name__}")
            raise

    def __getitems__(self, indices: EpochIndices) -> Any:
        with _isolated():
            seeds = sample_seeds(self.seed, indices.epoch, indices=list(indices.places))
            if fetches_together(self.dataset):
                randomness.seed_host(seeds[0])
                return self.dataset.__getitems__(list(indices))
            return [self._sample(index, seed) for index, seed in zip(indices, seeds, strict=True)]

    def _sample(self, index: Any, seed: int) -> Any:
        randomness.seed_host(seed)
        return self[index]


def fetches_together(dataset: Any) -> bool:
    """Return whether a dataset fetches many samples at once, and not one by one as torch's Subset does."""
    fetch = getattr(type(dataset), "__getitems__", None)
    if fetch is getattr(Subset, "__getitems__", None):
        return fetches_together(dataset.dataset)
    if fetch is getattr(StackDataset, "__getitems__", None):
        inner = dataset.datasets
        return any(map(fetches_together, inner.values() if isinstance(inner, dict) else inner))
    return getattr(dataset, "__getitems__", None) is not None


def _isolated() -> AbstractContextManager[None]:
    return nullcontext() if get_worker_info() else isolate_rng(include_cuda=False)


def seed_samples(loader: DataLoader, seed: int) -> None:
    """Let a loader seed its samples. It keeps its dataset: only its iterators see `SeededSamples`."""
    loader.worker_init_fn = partial(_init_worker, loader.worker_init_fn)
    vars(loader)["_get_iterator"] = partial(_make_iterator, loader, seed)
    vars(loader)[FIELD] = True


def is_seeded(loader: Any) -> bool:
    """Return whether the samples of a loader follow from (seed, epoch, place), so that none must be fetched again."""
    return FIELD in vars(loader) and not _has_own_generator(loader.dataset)


def _make_iterator(loader: DataLoader, seed: int) -> Any:
    view = copy(loader)
    del vars(view)["_get_iterator"]
    vars(view)["dataset"] = SeededSamples(loader.dataset, seed)
    return view._get_iterator()


def _init_worker(init: Any, worker_id: int) -> None:
    block_signals_in_worker(worker_id)  # the scheduler's warnings are for the ranks
    if init is not None:
        init(worker_id)


def _has_own_generator(dataset: Any) -> bool:
    """Return whether a dataset or a part of it draws from a generator of its own, which each worker has a copy of."""
    to_visit, seen = [dataset], set()
    while to_visit:
        part = to_visit.pop()
        if plain_forms.is_generator(part):
            return True
        if id(part) not in seen and not isinstance(part, NOT_SEARCHED):
            seen.add(id(part))
            to_visit += _parts(part)
    return False


def _parts(value: Any) -> list[Any]:
    """Return the attributes of an object, the entries of a container, and what a function has been given."""
    if isinstance(value, FunctionType | MethodType | partial):
        bound = [getattr(value, name, None) for name in ("__self__", "func", "args", "keywords")]
        return [*bound, *(cell.cell_contents for cell in getattr(value, "__closure__", None) or () if _is_full(cell))]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple | set | deque):
        return [part for part in islice(value, MAX_ENTRIES) if not isinstance(part, SIMPLE)]
    return [part for part in getattr(value, "__dict__", {}).values() if not isinstance(part, SIMPLE)]


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not set yet
        return False
