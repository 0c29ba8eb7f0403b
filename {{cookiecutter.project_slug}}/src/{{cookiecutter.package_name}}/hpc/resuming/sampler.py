"""One global order of samples, and random numbers tied to a sample: neither depends on how many ranks there are."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler


class GlobalBatchSampler(Sampler[tuple[int, np.ndarray]]):
    """(epoch, samples) of each micro-batch of one data-parallel rank, from an order that follows from (seed, epoch).

    Global batch `k` is `order[k * global_batch_size : (k + 1) * global_batch_size]` whatever the layout. It is cut
    into `accumulate` micro-steps and each of those into one micro-batch per rank. An incomplete last batch is left out.
    """

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
        """Lightning calls this before each epoch."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def go_to(self, epoch: int, start: int) -> None:
        """Go on in this epoch with global batch number `start`. The length stays that of a whole epoch."""
        self.epoch, self.start = epoch, start

    def __len__(self) -> int:
        micro_steps = self.global_batch_size // (self.micro_batch_size * self.num_ranks)
        return self.num_samples // self.global_batch_size * micro_steps

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        generator = torch.Generator().manual_seed(_key(self.seed, self.epoch))
        order = torch.randperm(self.num_samples, generator=generator).numpy()
        stride = self.micro_batch_size * self.num_ranks
        for step in range(self.start * self.global_batch_size // stride, len(self)):
            start = step * stride + self.rank * self.micro_batch_size
            yield self.epoch, order[start : start + self.micro_batch_size]


class ResumableLoader(DataLoader):
    """A loader over a `GlobalBatchSampler` that goes on in the middle of an epoch.

    By these two methods Lightning knows that it can. How far training has come is not known here, as workers fetch
    ahead: resume.py says it.
    """

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state and isinstance(self.sampler, GlobalBatchSampler):
            self.sampler.go_to(state["epoch"], state["global_batch"])


class EvalBatchSampler(Sampler[tuple[int, np.ndarray]]):
    """Every sample once over all ranks, in order, in equally many batches of equal size on each rank; epoch 0.

    What is missing to fill the last batches is marked by the index -1: the loader hands out a sample whose target the
    loss ignores, so that a metric does not depend on how many ranks share the evaluation.
    """

    def __init__(self, num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> None:
        self.num_samples, self.batch_size, self.rank, self.num_ranks = num_samples, batch_size, rank, num_ranks

    def __len__(self) -> int:
        return -(-self.num_samples // (self.batch_size * self.num_ranks))

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        for step in range(len(self)):
            start = (step * self.num_ranks + self.rank) * self.batch_size
            indices = np.arange(start, start + self.batch_size)
            yield 0, np.where(indices < self.num_samples, indices, -1)


def uniform(seed: int, epoch: int, index: Tensor, num: int) -> Tensor:
    """Random numbers in [0, 1) that are a function of (seed, epoch, sample index) alone.

    Args:
        seed: the run's seed.
        epoch: the epoch the samples are drawn in.
        index: sample indices, int64, shape (batch,), on any device.
        num: how many numbers each sample gets.

    Returns:
        float32, shape (batch, num), on the device of `index`; the same on every device and in every batch layout.
    """
    columns = torch.arange(1, num + 1, device=index.device)
    counter = index[:, None] * (num + 1) + columns + _key(seed, epoch)
    bits = _mix(counter) >> 11 & (1 << 24) - 1
    return bits.to(torch.float32) / (1 << 24)


def sample_seeds(seed: int, epoch: int, indices: list[int]) -> list[int]:
    """A number below 2**32 for each sample, a function of (seed, epoch, sample index) alone."""
    return (_mix(torch.tensor(indices) + _key(seed, epoch)) >> 16 & (1 << 32) - 1).tolist()


def _key(seed: int, epoch: int) -> int:
    return int(_mix(torch.tensor(seed * 1_000_003 + epoch))) & (1 << 62) - 1


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) on int64, which wraps around like uint64."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687  # 0xbf58476d1ce4e5b9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685  # 0x94d049bb133111eb
    return x ^ (x >> 31 & (1 << 33) - 1)
