"""Decisions that all ranks must make alike: they agree about once a second, and exchange nothing between.

They count moments at which they could agree: each beginning of an optimizer step, and each batch of an evaluation that
may be stopped. All ranks have the same moments.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from hpc.resume.early_agreement import EarlyAgreement

INTERVAL_SECONDS = 1.0  # between two agreements
RANK_BITS = 24  # of a number that holds a time and, in these lowest bits, the rank
MAX_GROWTH = 8  # an interval has at most so many times the moments of the last one: the first ones say little


@dataclass(frozen=True)
class RankRequest:
    """The request of one rank, or of all ranks together: the largest of each number."""

    stop: int = 0  # index of the reason to stop; 0: none
    save: int = 0
    is_best: int = 0
    is_not_finite: int = 0
    save_before_validation: int = 0  # a validation comes next that a stop would not wait for
    ranks_differ: int = 0  # never requested: the result of comparing checksums


@dataclass(frozen=True)
class RankTimes:
    """The ranks that spend most and least time of a step by themselves, in seconds."""

    slowest_rank: int
    slowest_seconds: float
    fastest_seconds: float


class Agreement:
    """Agreements of all ranks, which call `all_reduce_requests` at the same moments.

    Args:
        is_wanted: return whether this rank wants an agreement as soon as possible.

    Attributes:
        next_moment: the moment of the next agreement, unless `early` brings one before.
        take_own_microseconds: return the time that this rank has spent by itself in a step since the last agreement.
        rank_times: of all ranks, as they were at the last agreement; None: nobody measures them.
    """

    take_own_microseconds: Callable[[], int] | None = None
    rank_times: RankTimes | None = None

    def __init__(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        has_peers = dist.is_available() and dist.is_initialized()
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if has_peers else (0, 1)
        # On the host, so that an agreement waits for no kernel of a device.
        self.group: Any = dist.new_group(backend="gloo") if has_peers else None
        self.early = EarlyAgreement(is_wanted, rank=rank, num_ranks=num_ranks)
        self._moment = 0
        self.restart()

    def restart(self) -> None:
        """Agree at the next moment: an evaluation begins or has ended, and nobody knows how fast moments follow now."""
        self.next_moment, self._interval = self._moment + 1, 1
        self._last_moment, self._last_time = self.next_moment, time.monotonic()

    def is_due(self, *, is_needed: bool = False) -> bool:
        """Return whether all ranks agree at this moment. Must be called once at each moment.

        Args:
            is_needed: they agree in any case.
        """
        self._moment += 1
        return is_needed or self._moment >= self.next_moment or self.early.wait_if_promised(self._moment)

    def all_reduce_requests(self, request: RankRequest, *, checksum: int = 0) -> RankRequest:
        """Return the requests of all ranks together, at a moment that they share.

        Args:
            checksum: of what must be the same on all ranks; see `RankRequest.ranks_differ`.
        """
        numbers = [getattr(request, field.name) for field in fields(RankRequest)]
        own_microseconds = self.take_own_microseconds() if self.take_own_microseconds else 0
        numbers += [own_microseconds << RANK_BITS | self.early.rank, -own_microseconds]
        numbers += [checksum, -checksum, -self._moments_in_interval()]
        if self.group is not None:
            tensor = torch.tensor(numbers)
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
            numbers = tensor.tolist()
        self._interval = -numbers.pop()  # that of the slowest rank
        self.next_moment = self._moment + self._interval
        self._last_moment, self._last_time = self._moment, time.monotonic()
        self.early.conclude(self._moment)
        *requested, slowest, minus_fastest, largest_checksum, minus_smallest_checksum = numbers
        if microseconds := slowest >> RANK_BITS:
            self.rank_times = RankTimes(slowest & (1 << RANK_BITS) - 1, microseconds / 1e6, -minus_fastest / 1e6)
        return replace(RankRequest(*requested), ranks_differ=int(largest_checksum != -minus_smallest_checksum))

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.group is not None:
            dist.barrier(self.group)

    def _moments_in_interval(self) -> int:
        """Return how many moments this rank has in `INTERVAL_SECONDS`, judged by those since the last agreement."""
        num_moments, elapsed_seconds = self._moment - self._last_moment, time.monotonic() - self._last_time
        if num_moments <= 0:
            return self._interval
        expected = int(INTERVAL_SECONDS * num_moments / max(elapsed_seconds, 1e-9))
        return max(1, min(expected, self._interval * MAX_GROWTH))
