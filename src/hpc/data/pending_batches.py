"""Batches that an interrupted prediction has still to compute: samples that are not done, evenly shared out.

Ranks of a sharded network wait for each other in each forward pass, so each must compute as many batches as the others.
"""

import operator
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from hpc.data.even_batches import EvenBatches
from hpc.data.sample_order import ARRAYS, EpochIndices, SampleOrder, index_sampler


class PendingBatches(Sampler[Any]):
    """A list of batches, in the form in which a loader's own sampler gave them.

    Args:
        batches: at the end with some of another rank, only to compute as many as the others do.
        num_own: batches before those.
    """

    def __init__(self, batches: list[Any], num_own: int) -> None:
        self.batches, self.num_own = batches, num_own

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class RestOfStream:
    """A loader without its first batches, which are fetched and passed over: a stream has no indices.

    Args:
        report_progress: called after each batch that is passed over.
    """

    def __init__(self, loader: Any, num_passed: int, *, report_progress: Callable[[], None]) -> None:
        self.loader, self.num_passed, self.report_progress = loader, num_passed, report_progress

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # missing in a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return max(0, len(self.loader) - self.num_passed)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        for _ in islice(batches, self.num_passed):
            self.report_progress()
        return batches


def sample_indices(loader: Any, batch_idx: int) -> list[int] | None:
    """Return the indices of a batch's samples in the dataset; None if the loader does not tell."""
    sampler = index_sampler(loader)
    if isinstance(sampler, PendingBatches):
        return _indices(sampler.batches[batch_idx])
    if isinstance(sampler, SampleOrder) and sampler.gives == ARRAYS:
        return list(sampler.parts[batch_idx])  # type: ignore[index]  # in the order of the dataset
    seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)  # Lightning's wrapper has it
    return _indices(seen[batch_idx]) if seen else None


def is_repeated(loader: Any, batch_idx: int) -> bool:
    """Return whether another rank has the same batch, and this one computes it only to keep in step."""
    if isinstance(loader, EvenBatches) and not loader.is_own(batch_idx):
        return True
    sampler = index_sampler(loader)
    return isinstance(sampler, PendingBatches) and batch_idx >= sampler.num_own


def leave_out_done(
    loader: DataLoader, is_done: np.ndarray, *, limit: float, rank: int, num_ranks: int
) -> PendingBatches:
    """Let a loader give only samples that are not done, in equally many batches on each rank. All ranks call this.

    Batches of which nothing is done stay as they are. If ranks have done different numbers of batches, those that are
    further get some of the others'. The loader's iterators must be created again.

    Args:
        is_done: of each sample, by its index; samples beyond its end are not done.
        limit: number of batches that an uninterrupted prediction takes from this loader; may be infinite.
        rank, num_ranks: of the ranks that get different samples.
    """
    batches = islice(iter(index_sampler(loader)), None if limit == float("inf") else int(limit))
    own = [pending for batch in batches if (pending := _without_done(batch, is_done)) is not None]
    shared = _share_evenly(own, rank=rank, num_ranks=num_ranks)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(loader)[name] = shared  # DataLoader does not allow this attribute to be set
    return shared


def all_gather(value: Any) -> list[Any]:
    """Return the values of all processes, in the order of their ranks. All of them call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _share_evenly(own: list[Any], *, rank: int, num_ranks: int) -> PendingBatches:
    """Return equally many batches for each rank: batches move from ranks with many to ranks with few."""
    lengths = _gather_by_rank(len(own), rank=rank, num_ranks=num_ranks)
    target = -(-sum(lengths) // num_ranks)
    spare_batches = _gather_by_rank((own[target:], own[:1]), rank=rank, num_ranks=num_ranks)
    spare = [batch for batches, _ in spare_batches for batch in batches]
    first_spare = sum(max(0, target - length) for length in lengths[:rank])
    own = own[:target]
    own += spare[first_spare : first_spare + target - len(own)]
    num_own = len(own)
    repeated = [batch for _, first in spare_batches for batch in first][:1]
    return PendingBatches(own + repeated * (target - num_own), num_own)


def _gather_by_rank(value: Any, *, rank: int, num_ranks: int) -> list[Any]:
    """Return a value of each rank. Processes of the same rank, as in tensor parallelism, have the same value."""
    values = dict(all_gather((rank, value)))
    return [values[number] for number in range(num_ranks)]


def _without_done(batch: Any, is_done: np.ndarray) -> Any:
    """Return what is left of a batch, in the same form; None if nothing is."""
    if (indices := _indices(batch)) is None:
        return batch
    pending = [number for number in indices if number >= len(is_done) or not is_done[number]]
    if not pending or len(pending) == len(indices):
        return batch if pending else None
    if isinstance(batch, tuple) and isinstance(batch[-1], np.ndarray):
        return (*batch[:-1], np.array(pending))
    if isinstance(batch, EpochIndices):
        places = dict(zip(indices, batch.places, strict=True))
        rest = EpochIndices(pending)
        rest.epoch, rest.places = batch.epoch, [places[number] for number in pending]
        return rest
    return pending


def _indices(batch: Any) -> list[int] | None:
    """Return the sample indices in what a sampler gives: one, several, or (epoch, array); None for anything else."""
    if isinstance(batch, tuple) and len(batch) == 2 and isinstance(batch[1], np.ndarray):
        batch = batch[1]
    if isinstance(batch, np.ndarray | Tensor):
        batch = batch.tolist()
    try:
        return [operator.index(number) for number in (batch if isinstance(batch, list | tuple | range) else [batch])]
    except TypeError:
        return None
