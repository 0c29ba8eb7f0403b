"""One global order of samples, and random numbers tied to a sample: neither depends on the number of ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler


# The samplers of this project are subclasses of DistributedSampler. Otherwise Lightning would shard their batches a
# second time if trainer.use_distributed_sampler is true.
# pyright: reportMissingSuperCall=false, reportIncompatibleMethodOverride=false
class GlobalOrderSampler(DistributedSampler):
    """The micro-batches of one data-parallel rank as (epoch, indices), in a global order given by (seed, epoch).

    Global batch `k` is `order[k * global_batch_size : (k + 1) * global_batch_size]` in every layout. It is cut into
    `accumulate` micro-steps, and each of those into one micro-batch per rank. An incomplete last batch is left out.
    """

    repeats_first_epoch = False

    def __init__(
        self, num_samples: int, global_batch_size: int, *, rank: int, num_ranks: int, accumulate: int, seed: int
    ) -> None:
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.num_ranks = num_ranks
        self.micro_batch_size = global_batch_size // (num_ranks * accumulate)
        self.seed = seed
        self.epoch = self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch; Lightning calls this before each epoch."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def go_to(self, epoch: int, start: int) -> None:
        """Let the next pass begin after `start` micro-batches of this epoch; passes after that begin at 0.

        The length stays that of a whole epoch.
        """
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        micro_steps = self.global_batch_size // (self.micro_batch_size * self.num_ranks)
        return self.num_samples // self.global_batch_size * micro_steps

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        generator = torch.Generator().manual_seed(epoch_key(self.seed, 0 if self.repeats_first_epoch else self.epoch))
        order = torch.randperm(self.num_samples, generator=generator).numpy()
        stride = self.micro_batch_size * self.num_ranks
        first, self.start = self.start, 0
        for step in range(first, len(self)):
            start = step * stride + self.rank * self.micro_batch_size
            yield self.epoch, order[start : start + self.micro_batch_size]


class RepeatedBatchSampler(GlobalOrderSampler, SequentialSampler):
    """The same batches in every epoch, for `trainer.overfit_batches`.

    It is a SequentialSampler, as Lightning then replaces any other sampler by one of single indices.
    """

    repeats_first_epoch = True


class ResumableLoader(DataLoader):
    """A loader over a `GlobalOrderSampler` that can begin in the middle of an epoch.

    Lightning recognizes that by these two methods. The loader does not know how far training has come, as workers fetch
    ahead: `position.start_at` passes the place.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and isinstance(self.sampler, GlobalOrderSampler):
            self.sampler.go_to(state["epoch"], state["batches"])


class EvalBatchSampler(DistributedSampler, SequentialSampler):
    """Every sample once over all ranks, in order, in equally many batches on each rank. See `batch_ranges`."""

    def __init__(self, num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> None:
        self.parts = batch_ranges(num_samples, batch_size, rank=rank, num_ranks=num_ranks)

    def set_epoch(self, epoch: int) -> None:
        """Keep the order; Lightning calls this before each evaluation."""

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        for part in self.parts:
            yield 0, np.arange(part.start, part.stop)


def batch_ranges(num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> list[range]:
    """Return the positions of each batch of one rank, so that all ranks together have every sample once.

    Ranks have equally many batches, none is empty, and no sample is repeated to fill one. The last batches of the ranks
    differ by one sample at most. They hold up to one more than `batch_size` if too few samples are left for one more
    batch on each rank.
    """
    whole, rest = divmod(num_samples, batch_size * num_ranks)
    num = max(1, whole + (rest >= num_ranks)) if num_samples else 0
    parts = []
    for first in range(0, num * batch_size * num_ranks, batch_size * num_ranks):
        size = batch_size * num_ranks if len(parts) < num - 1 else num_samples - first
        parts.append(range(first + size * rank // num_ranks, first + size * (rank + 1) // num_ranks))
    return parts


def training_ranges(num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> list[range]:
    """Return the positions of each batch of one rank, cut from the batches of one process that trains alone.

    That process has batches of `batch_size * num_ranks`, of which the last may be smaller. The parts of a batch differ
    by one sample at most, so those of the last ranks may be empty.
    """
    parts = []
    for first in range(0, num_samples, batch_size * num_ranks):
        size = min(batch_size * num_ranks, num_samples - first)
        begin, end = (-(-size * part // num_ranks) for part in (rank, rank + 1))  # rounded up
        parts.append(range(first + begin, first + end))
    return parts


def uniform_per_sample(seed: int, epoch: int, *, indices: Tensor, num: int) -> Tensor:
    """Return random numbers in [0, 1) that are a function of (seed, epoch, sample index) alone.

    Args:
        seed: the run's seed.
        epoch: the epoch in which the samples are drawn.
        indices: of the samples, int64, shape (batch,), on any device.
        num: numbers per sample.

    Returns:
        float32, shape (batch, num), on the device of `indices`; the same on every device and in every batch layout.
    """
    columns = torch.arange(1, num + 1, device=indices.device)
    counter = indices[:, None] * (num + 1) + columns + epoch_key(seed, epoch)
    bits = _mix(counter) >> 11 & (1 << 24) - 1
    return bits.to(torch.float32) / (1 << 24)


def sample_seeds(seed: int, epoch: int, *, indices: list[int]) -> list[int]:
    """Return a number below 2**32 for each sample, a function of (seed, epoch, sample index) alone."""
    return (_mix(torch.tensor(indices) + epoch_key(seed, epoch)) >> 16 & (1 << 32) - 1).tolist()


def epoch_key(seed: int, epoch: int) -> int:
    """Return a number below 2**62 that is a function of (seed, epoch) alone."""
    return int(_mix(torch.tensor(seed * 1_000_003 + epoch))) & (1 << 62) - 1


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) to int64, which wraps around like uint64."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687  # 0xbf58476d1ce4e5b9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685  # 0x94d049bb133111eb
    return x ^ (x >> 31 & (1 << 33) - 1)
