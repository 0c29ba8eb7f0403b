"""Random numbers of samples, drawn in any library, as a function of (seed, epoch, place in the epoch's order).

So they are the same in every layout and after a resume, and no batch must be fetched again to find them.
"""

from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hpc.data.rank_samplers import EpochIndices
from hpc.data.sampler import sample_seeds
from hpc.run.signals import block_signals_in_worker
from hpc.state import plain_forms, randomness

INNER = ("dataset", "transform", "transforms", "target_transform")  # attributes that hold parts of a dataset
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
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"in sample {index} of {type(self.dataset).__name__}")
            raise

    def __getitems__(self, indices: EpochIndices) -> Any:
        with nullcontext() if get_worker_info() else isolate_rng(include_cuda=False):
            seeds = sample_seeds(self.seed, indices.epoch, indices=list(indices.places))
            if getattr(self.dataset, "__getitems__", None):
                randomness.seed_host(seeds[0])
                return self.dataset.__getitems__(list(indices))
            return [self._sample(index, seed) for index, seed in zip(indices, seeds, strict=True)]

    def _sample(self, index: Any, seed: int) -> Any:
        randomness.seed_host(seed)
        return self[index]


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
        if id(part) in seen or not hasattr(part, "__dict__"):
            continue
        seen.add(id(part))
        if any(plain_forms.is_generator(value) for value in vars(part).values()):
            return True
        to_visit += [getattr(part, name, None) for name in INNER]
        to_visit += [*(getattr(part, "datasets", None) or ())]
    return False
