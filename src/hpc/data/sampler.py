"""How batches are cut among ranks, and random numbers tied to a sample: neither depends on the number of ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor


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


class MicroBatches(Sequence[range]):
    """The positions of each micro-batch of one rank. An incomplete last global batch is left out.

    Each global batch is cut into `accumulate` micro-steps, and each of those into one micro-batch per rank.
    """

    def __init__(self, num_samples: int, global_batch_size: int, *, rank: int, num_ranks: int, accumulate: int) -> None:
        self.num = num_samples // global_batch_size * accumulate
        self.size, self.rank, self.num_ranks = global_batch_size // (num_ranks * accumulate), rank, num_ranks

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, step: int) -> range:  # type: ignore[override]
        if not 0 <= step < self.num:
            raise IndexError(step)
        first = (step * self.num_ranks + self.rank) * self.size
        return range(first, first + self.size)


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
