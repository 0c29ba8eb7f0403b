"""A rank's part of the order that a researcher's own sampler gives: the same order on all ranks, and no sample twice.

The order is a function of (seed, epoch), unless the sampler has a generator of its own. It is drawn apart from the
random numbers of training.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import Sampler

from hpc.data.sampler import epoch_key
from hpc.state import randomness

END = object()


BATCH_PLACES = 1 << 24  # places in an order that are kept free for each batch of a batch sampler


class EpochIndices(list):
    """The indices of a batch, with what the random numbers of their samples depend on: the epoch, and their places.

    Places in the order differ where an index comes twice, as of a sampler with replacement.
    """

    epoch = 0
    places: Sequence[int] = ()


@dataclass(frozen=True)
class EpochIndex:
    """The index of a sample of a loader that makes no batches, with what its random numbers depend on."""

    index: Any
    epoch: int
    place: int


class RankSampler(Sampler[Any]):
    """A part of the order of another sampler. A subclass says which part.

    Its loader holds it in place of that sampler, whose other attributes are read and set through it: a module may
    change the weights of `trainer.train_dataloader.sampler` as it does in a plain Trainer.

    Attributes:
        checksum: of the first order that was drawn in this epoch, or of its beginning.
        is_compared: whether the checksum was compared with those of other ranks.
        is_even: whether all ranks have equally many batches.
    """

    is_even = True

    sampler: Any
    epoch: int
    checksum: int | None
    is_compared: bool

    def __init__(self, sampler: Any, *, seed: int, **part: Any) -> None:
        own = {"seed": seed, "epoch": 0, "checksum": None, "is_compared": False}
        vars(self).update(own, sampler=sampler, **part)

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # missing in a copy that is being made
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name in vars(self) or not hasattr(self.sampler, name)
        object.__setattr__(self, name, value) if is_own else setattr(self.sampler, name, value)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; Lightning calls this before each epoch."""
        if epoch != self.epoch:  # another order, which may depend on what each rank has trained on
            self.epoch, self.checksum, self.is_compared = epoch, None, False
        owner: Any
        for owner in (self.sampler, getattr(self.sampler, "sampler", None)):  # a batch sampler has another one inside
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    def _draw(self) -> Iterator[Any]:
        """Yield the order, all of it drawn at once if its length is known."""
        key = epoch_key(self.seed, self.epoch) % (1 << 32)
        if sized_len(self.sampler) is None:
            return draw_apart(self.sampler, key)
        with isolate_rng(include_cuda=False):
            randomness.seed_host(key)
            return iter(list(self.sampler))

    def _note(self, order: Any) -> None:
        if self.checksum is None:
            content = order.data if isinstance(order, np.ndarray) else repr(order).encode()
            self.checksum = zlib.crc32(content)

    def _batch(self, indices: Iterable[Any], first: int) -> EpochIndices:
        """Return a batch whose samples lie in the order from the place `first` on."""
        batch = EpochIndices(indices)
        batch.epoch, batch.places = self.epoch, range(first, first + len(batch))
        return batch


class RankBatchSampler(RankSampler):
    """The batches of one rank, cut from the order of a sampler of known length.

    Args:
        batch_size, drop_last: as of torch's BatchSampler.
        parts: the positions in that order of each batch of this rank; see `batch_ranges` and `training_ranges`. For an
            empty part it gets a sample to compute along with.
        is_even: all ranks have equally many.
        last_size: samples of all ranks in the last batch; None: equally many on each.
        num_ranks: ranks that share a batch out.
    """

    def __init__(
        self,
        sampler: Any,
        parts: list[range],
        *,
        seed: int,
        batch_size: int = 1,
        drop_last: bool = False,
        is_even: bool = True,
        last_size: int | None = None,
        num_ranks: int = 1,
    ) -> None:
        sizes = {"batch_size": batch_size, "drop_last": drop_last, "last_size": last_size, "num_ranks": num_ranks}
        super().__init__(sampler, seed=seed, parts=parts, is_even=is_even, **sizes)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[EpochIndices]:
        order = _compact(self._draw())
        self._note(order)
        for part in self.parts:
            first = part.start if part else len(order) - 1
            indices = order[first : max(first + 1, part.stop)]
            yield self._batch(indices.tolist() if isinstance(indices, np.ndarray) else indices, first)

    def share(self, number: int) -> float:
        """Return how many samples of a batch this rank has, relative to the mean of all ranks."""
        is_last = number == len(self.parts) - 1
        return len(self.parts[-1]) * self.num_ranks / self.last_size if is_last and self.last_size else 1.0


class RankTurns(RankSampler):
    """Every `num_ranks`-th batch of a batch sampler, or of a sampler whose samples are batches already.

    Args:
        drops_rest: all ranks get equally many batches, as in training; the last ones of an epoch may be left out.
        has_batches: the sampler gives batches; False: what its loader takes as the index of a sample.
    """

    def __init__(
        self, sampler: Any, *, rank: int, num_ranks: int, drops_rest: bool, has_batches: bool, seed: int
    ) -> None:
        part = {"rank": rank, "num_ranks": num_ranks, "drops_rest": drops_rest, "has_batches": has_batches}
        super().__init__(sampler, seed=seed, is_even=drops_rest, **part)

    def __len__(self) -> int:
        """Return the number of batches. Raises `TypeError` if the sampler does not know it."""
        ahead = 0 if self.drops_rest else self.num_ranks - 1 - self.rank
        return (len(self.sampler) + ahead) // self.num_ranks

    def __iter__(self) -> Iterator[Any]:
        order = self._draw()
        for number in count(self.rank, self.num_ranks):
            if not (turn := list(islice(order, self.num_ranks))):
                return
            self._note(turn)
            if len(turn) > self.rank and not (self.drops_rest and len(turn) < self.num_ranks):
                batch, place = turn[self.rank], number * BATCH_PLACES
                if self.has_batches:
                    yield self._batch(batch, place)
                else:  # an evaluation seeds no samples
                    yield EpochIndex(batch, self.epoch, place) if self.drops_rest else batch


def _compact(order: Iterator[Any]) -> Any:
    """Return an order of integers as an array, which takes a fifth of the memory of a list; else a list."""
    first = next(order, None)
    rest = order if first is None else chain([first], order)
    return np.fromiter(rest, np.int64) if type(first) is int else list(rest)


def draw_apart(items: Iterable[Any], key: int) -> Iterator[Any]:
    """Yield the items, which draw random numbers that begin with a seed and leave all others as they are."""
    iterator, state = None, None
    while True:
        with isolate_rng(include_cuda=False):
            if state is None:
                randomness.seed_host(key)
                iterator = iter(items)
            else:
                randomness.restore(state)
            item = next(iterator, END)  # type: ignore[arg-type]
            state = randomness.plain_state()
        if item is END:
            return
        yield item
