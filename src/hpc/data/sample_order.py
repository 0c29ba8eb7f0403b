"""One order of samples for every layout: drawn once from (seed, epoch), and each rank takes its part of it."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from hpc.data import sampler_state
from hpc.privates.lightning import IndexBatchSamplerWrapper
from hpc.state import randomness
from hpc.state.randomness import epoch_key

BATCHES, INDICES, ARRAYS = "batches", "indices", "arrays"  # what an order gives; see SampleOrder


class EpochIndices(list):
    """The indices of a batch, with what the random numbers of their samples depend on: the epoch, and their places.

    Places in the order differ where an index comes twice, as of a sampler with replacement.
    """

    epoch = 0
    places: Sequence[int] = ()


@dataclass(frozen=True)
class EpochIndex:
    """What a loader that makes no batches asks for, with what its random numbers depend on."""

    index: Any  # of a sample; or those of a batch, as an array
    epoch: int
    place: int  # in the order, of the first one

    def __index__(self) -> int:
        return self.index


# Lightning would shard the batches of any other class than DistributedSampler a second time, and replace those of any
# other class than SequentialSampler if trainer.overfit_batches is set.
# pyright: reportMissingSuperCall=false, reportIncompatibleMethodOverride=false
class SampleOrder(DistributedSampler, SequentialSampler):
    """The batches of one data-parallel rank, cut from an order of samples that is the same in every layout.

    The order of an epoch is a permutation in place of torch's RandomSampler, and for any other sampler what it lists:
    all random numbers, those of its own generators, too, begin with a seed that follows from (seed, epoch).

    A loader holds it in place of the sampler, whose other attributes are read and set through it: a module may change
    the weights of `trainer.train_dataloader.sampler` as it does in a plain Trainer.

    Args:
        sampler: of known length. It gives samples or, if there are no `parts`, batches.
        parts: the positions in the order of each batch of this rank; see batch_parts.py. For an
            empty part it gets a sample to compute along with. None: ranks take the sampler's batches in turns.
        drops_rest: of batches in turns, all ranks get equally many: the last ones of an epoch may be left out.
        gives: "batches": EpochIndices; "indices": EpochIndex, one sample at a time; "arrays": EpochIndex of an array.
        is_even: all ranks have equally many batches.
        is_shared: the order is that of all ranks; False: the sampler already gives this rank a part of its own.
        repeats_first_epoch: each epoch has the order of the first one.
        batch_size, drop_last: as of torch's BatchSampler.
        last_size: samples of all ranks in the last batch; None: equally many on each.

    Attributes:
        start: batches of this epoch that the next pass leaves out.
        checksum: of the order of this epoch, once it was drawn; its length, from which ours follows.
        is_compared: whether the checksum was compared with those of other ranks.
    """

    def __init__(
        self,
        sampler: Any,
        parts: Sequence[range] | None = None,
        *,
        seed: int,
        rank: int = 0,
        num_ranks: int = 1,
        drops_rest: bool = True,
        gives: str = BATCHES,
        is_even: bool = True,
        is_shared: bool = True,
        repeats_first_epoch: bool = False,
        batch_size: int | None = None,
        drop_last: bool = False,
        last_size: int | None = None,
    ) -> None:
        given = {"sampler": sampler, "parts": parts, "seed": seed, "rank": rank, "num_ranks": num_ranks}
        given |= {"drops_rest": drops_rest, "gives": gives, "is_even": is_even, "is_shared": is_shared}
        given |= {"repeats_first_epoch": repeats_first_epoch, "last_size": last_size}
        given |= {"batch_size": batch_size, "drop_last": drop_last}
        own = {"epoch": 0, "start": 0, "checksum": None, "is_compared": False, "before": []}
        vars(self).update(given, **own, initial=sampler_state.fingerprints(sampler))

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # missing in a copy that is being made
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in vars(self) or not hasattr(self.sampler, name)
        object.__setattr__(self, name, value) if is_own else setattr(self.sampler, name, value)

    def __len__(self) -> int:
        if self.parts is not None:
            return len(self.parts)
        ahead = 0 if self.drops_rest else self.num_ranks - 1 - self.rank
        return (len(self.sampler) + ahead) // self.num_ranks

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; Lightning calls this before each epoch."""
        if epoch != self.epoch:  # another order, which may depend on what each rank has trained on
            self.epoch, self.start, self.checksum, self.is_compared = epoch, 0, None, False
        for sampler in sampler_state.samplers_of(self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def go_to(self, epoch: int, start: int) -> None:
        """Let the next pass begin after `start` batches of this epoch; passes after that begin at 0.

        The length stays that of a whole epoch.
        """
        self.set_epoch(epoch)
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        first, self.start = self.start, 0
        order, parts = self._list()
        for number in range(first, len(parts)):
            yield self._batch(order, parts[number])

    def share(self, number: int) -> float:
        """Return how many samples of a batch this rank has, relative to the mean of all ranks."""
        if self.parts is None or self.last_size is None or number < len(self.parts) - 1:
            return 1.0
        return len(self.parts[-1]) * self.num_ranks / self.last_size

    def state(self, *, between_epochs: bool) -> dict[str, Any]:
        """Return what lists the same order again, or the next one between epochs, as plain data."""
        now = sampler_state.changed(self.sampler, self.initial)
        return {"now": now} if between_epochs else {"before": self.before, "now": now, "checksum": self.checksum}

    def _list(self) -> tuple[Any, Sequence[range]]:
        """Return the samples of all ranks in their order, and the positions of each batch of this rank."""
        order = self._draw()
        if self.parts is not None:
            return order, self.parts
        batches = [list(batch) for batch in order]
        num = len(batches) // self.num_ranks * self.num_ranks if self.drops_rest else len(batches)
        parts = [range(*ends) for ends in pairwise(accumulate(map(len, batches), initial=0))]
        return _compact(chain.from_iterable(batches)), parts[self.rank : num : self.num_ranks]

    def _draw(self) -> Any:
        key, sampler = epoch_key(self.seed, 0 if self.repeats_first_epoch else self.epoch), self.sampler
        self.before, self.checksum = sampler_state.changed(sampler, self.initial), len(sampler)
        if type(sampler) is SequentialSampler:
            return np.arange(len(sampler))
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
            return torch.randperm(len(sampler), generator=torch.Generator().manual_seed(key)).numpy()
        generators = sampler_state.generators_of(sampler)
        with isolate_rng(include_cuda=False), randomness.kept(generators):
            randomness.seed_host(key % (1 << 32))
            randomness.seed_generators(generators, key % (1 << 32))
            order = list(sampler) if self.parts is None else _compact(sampler)
        self.checksum = zlib.crc32(order.data if isinstance(order, np.ndarray) else repr(order).encode())
        return order

    def _batch(self, order: Any, part: range) -> Any:
        first = part.start if part else len(order) - 1
        indices = order[first : max(first + 1, part.stop)]
        if self.gives == ARRAYS:
            return EpochIndex(indices, self.epoch, first)
        indices = indices.tolist() if isinstance(indices, np.ndarray) else indices
        if self.gives == INDICES:
            return EpochIndex(indices[0], self.epoch, first)
        batch = EpochIndices(indices)
        batch.epoch, batch.places = self.epoch, range(first, first + len(batch))
        return batch


def index_sampler(loader: Any) -> Any:
    """Return the sampler that gives the indices of each batch, or of each sample if a loader makes no batches."""
    return getattr(loader, "_index_sampler", None)


def unwrap(batches: Any) -> Any:
    """Return the batch sampler that Lightning has wrapped to record the samples of a prediction."""
    return batches._batch_sampler if isinstance(batches, IndexBatchSamplerWrapper) else batches


def order_of(loader: Any) -> SampleOrder | None:
    """Return the order from which a loader takes its batches; None for a stream and the like."""
    order = unwrap(index_sampler(loader))
    return order if isinstance(order, SampleOrder) else None


def _compact(order: Iterable[Any]) -> Any:
    """Return an order of integers as an array, which takes a fifth of the memory of a list; else a list."""
    indices = iter(order)
    first = next(indices, None)
    rest = indices if first is None else chain([first], indices)
    return np.fromiter(rest, np.int64) if type(first) is int else list(rest)
