"""Random numbers of samples, drawn in any library, as a function of (seed, epoch, place in the epoch's order).

So they are the same in every layout and after a resume, and no batch must be fetched again to find them.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from itertools import islice
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, StackDataset, Subset, get_worker_info

from hpc.data.sample_order import EpochIndex, EpochIndices
from hpc.run.signals import block_signals_in_worker
from hpc.state import plain_forms, randomness

COLLATED = 1  # makes another seed of the first sample's
MAX_ENTRIES = 1000  # of a container that are looked at; a longer one holds samples
SIMPLE = (bool, int, float, str, bytes, type(None), Tensor, np.ndarray)
# Objects that know the whole run.
NOT_SEARCHED = (*SIMPLE, type, ModuleType, L.Trainer, L.LightningModule, L.LightningDataModule, L.Callback)
WATCH = "_watched_fetches"  # of a loader: a list with what watches its fetches in this process, or none


class SeededSamples(Dataset):
    """A dataset that is indexed by the indices of a batch, and collates it. All random numbers follow from the place.

    The host's generators, and those that the dataset or the collate function keeps, are seeded before each sample, and
    again before samples are collated. A dataset that fetches many samples at once is seeded once for them all.
    """

    def __init__(self, dataset: Any, collate: Any, *, seed: int, watch: Sequence[Any] = ()) -> None:
        self.dataset, self.collate, self.seed, self.watch = dataset, collate, seed, watch
        self.generators = [*find_generators([dataset, collate])]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: EpochIndex) -> Any:
        """Return the sample of a loader that makes no batches."""
        return self.fetch(index.epoch, [index.index], places=[index.place], is_batch=False)

    def __getitems__(self, indices: EpochIndices) -> Any:
        return self.fetch(indices.epoch, list(indices), places=indices.places)

    def fetch(self, epoch: int, indices: list[Any], *, places: Sequence[int], is_batch: bool = True) -> Any:
        """Return the samples of a batch, collated; of `is_batch` False, the one sample."""
        with ExitStack() as stack:
            if get_worker_info() is None:  # a worker has copies of its own
                stack.enter_context(isolate_rng(include_cuda=False))
                stack.enter_context(randomness.kept(self.generators))
                for watch in self.watch:
                    stack.enter_context(watch())
            seeds = randomness.sample_seeds(self.seed, epoch, places=places)
            if is_batch and fetches_together(self.dataset):
                self._seed(seeds[0])
                samples = self.dataset.__getitems__(indices)
            else:
                samples = [self._sample(index, seed) for index, seed in zip(indices, seeds, strict=True)]
            self._seed(seeds[0] ^ COLLATED)
            return self.collate(samples if is_batch else samples[0])

    def _sample(self, index: Any, seed: int) -> Any:
        self._seed(seed)
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"in sample {index} of {type(self.dataset).__name__}")
            raise

    def _seed(self, seed: int) -> None:
        randomness.seed_host(seed)
        randomness.seed_generators(self.generators, seed)


def fetches_together(dataset: Any) -> bool:
    """Return whether a dataset fetches many samples at once, and not one by one as torch's Subset does."""
    fetch = getattr(type(dataset), "__getitems__", None)
    if fetch is getattr(Subset, "__getitems__", None):
        return fetches_together(dataset.dataset)
    if fetch is getattr(StackDataset, "__getitems__", None):
        inner = dataset.datasets
        return any(map(fetches_together, inner.values() if isinstance(inner, dict) else inner))
    return getattr(dataset, "__getitems__", None) is not None


def seed_samples(loader: DataLoader, seed: int) -> None:
    """Let a loader seed its samples. It keeps its dataset: only its iterators see `SeededSamples`."""
    loader.worker_init_fn = partial(_init_worker, loader.worker_init_fn)
    vars(loader)["_get_iterator"] = partial(_make_iterator, loader, seed)
    vars(loader)[WATCH] = []


def watch_fetches(loaders: Any, watch: Any) -> None:
    """Let a context manager be entered around each fetch of these loaders in this process."""
    for loader in tree_leaves(loaders):
        if (watches := getattr(loader, WATCH, None)) is not None:
            watches[:] = [watch]


def _make_iterator(loader: DataLoader, seed: int) -> Any:
    view, watch = copy(loader), vars(loader)[WATCH] if not loader.num_workers else []
    del vars(view)["_get_iterator"]
    vars(view)["dataset"] = SeededSamples(loader.dataset, loader.collate_fn, seed=seed, watch=watch)
    view.collate_fn = as_it_is
    return view._get_iterator()


def as_it_is(batch: Any) -> Any:
    """Collate nothing: the batch is one already."""
    return batch


def _init_worker(init: Any, worker_id: int) -> None:
    block_signals_in_worker(worker_id)  # the scheduler's warnings are for the ranks
    if init is not None:
        init(worker_id)


def find_generators(roots: list[Any]) -> Iterator[Any]:
    """Yield the generators that a dataset or a collate function keeps, in itself or in its parts."""
    to_visit, seen = list(roots), set()
    while to_visit:
        part = to_visit.pop()
        if id(part) in seen or isinstance(part, NOT_SEARCHED):
            continue
        seen.add(id(part))
        if plain_forms.is_generator(part):
            yield part
        else:
            to_visit += _parts(part)


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
