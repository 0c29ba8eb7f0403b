"""How batches are cut among ranks: the samples of a step do not depend on the number of ranks."""

from collections.abc import Sequence


def batch_ranges(num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> list[range]:
    """Return the positions of each batch of one rank in an evaluation: all ranks together have every sample once.

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


class TrainingRanges(Sequence[range]):
    """The positions of each batch of one rank, cut from the batches of one process that trains alone.

    That process has batches of `batch_size * num_ranks`, of which the last may be smaller. The parts of a batch differ
    by one sample at most, so those of the last ranks may be empty.
    """

    def __init__(self, num_samples: int, batch_size: int, *, rank: int, num_ranks: int) -> None:
        self.num_samples, self.whole, self.rank, self.num_ranks = num_samples, batch_size * num_ranks, rank, num_ranks

    def __len__(self) -> int:
        return -(-self.num_samples // self.whole)

    def __getitem__(self, number: int) -> range:  # type: ignore[override]
        first = range(0, self.num_samples, self.whole)[number]
        size = min(self.whole, self.num_samples - first)
        begin, end = (-(-size * part // self.num_ranks) for part in (self.rank, self.rank + 1))  # rounded up
        return range(first + begin, first + end)
