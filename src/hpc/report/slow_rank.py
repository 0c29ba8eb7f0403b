"""A rank that all others wait for, step after step, from the curves `perf/slowest_rank` of the newest attempt. Pure."""

from dataclasses import dataclass
from math import isfinite
from statistics import median

from hpc.monitor.event_files import RunCurves
from hpc.run.history import AttemptRecord

TAGS = ("perf/slowest_rank", "perf/own_seconds_slowest_rank", "perf/own_seconds_fastest_rank")
# Some rank is always the slowest. Of two equally fast ones, one is so in 9 of 10 exchanges by chance in 2 % of runs.
MIN_EXCHANGES = 10
MIN_SHARE_OF_EXCHANGES = 0.9
MIN_SHARE_OF_STEP = 0.1  # that the others wait: with less to gain, looking for another node is not worth it


@dataclass(frozen=True)
class SlowRank:
    """A rank, how often it was the slowest, and the seconds of a step that it and the fastest spend by themselves."""

    rank: int
    host: str  # "" if it is unknown
    own_seconds: float
    fastest_seconds: float
    num_slowest: int
    num_exchanges: int

    @property
    def wait_seconds(self) -> float:
        """The seconds of a step that the fastest rank waits for it."""
        return self.own_seconds - self.fastest_seconds


def find_slow_rank(curves: RunCurves, attempt: AttemptRecord | None) -> SlowRank | None:
    """Return the rank that was the slowest in nearly all exchanges of an attempt, and for which the others wait long.

    Ranks exchange their times about once a second. Between two exchanges, points of the curves repeat the last one.

    Returns:
        None: there is no such rank, or there were too few exchanges.
    """
    step_seconds = curves.mean("perf/step_seconds")
    exchanges = _list_exchanges(curves, from_step=attempt.from_step) if attempt else []
    if attempt is None or not step_seconds or len(exchanges) < MIN_EXCHANGES:
        return None
    ranks = [int(rank) for rank, _, _ in exchanges]
    rank = max(set(ranks), key=ranks.count)
    own, fastest = (median(exchange[index] for exchange in exchanges) for index in (1, 2))
    is_persistent = ranks.count(rank) >= MIN_SHARE_OF_EXCHANGES * len(ranks)
    if not is_persistent or own - fastest < MIN_SHARE_OF_STEP * step_seconds:
        return None
    return SlowRank(rank, _host_of(rank, attempt), own, fastest, ranks.count(rank), len(ranks))


def _list_exchanges(curves: RunCurves, *, from_step: int) -> list[tuple[float, ...]]:
    """Return rank, its own seconds, and those of the fastest, of each exchange from this step on."""
    by_step = [dict(curves.points.get(tag, [])) for tag in TAGS]
    steps = sorted(step for step in by_step[0] if step >= from_step and all(step in values for values in by_step))
    points = [tuple(values[step] for values in by_step) for step in steps]
    known = [point for point in points if all(map(isfinite, point))]
    return [point for index, point in enumerate(known) if not index or point != known[index - 1]]


def _host_of(rank: int, attempt: AttemptRecord) -> str:
    """Return the node of a rank: ranks are packed node by node."""
    is_known = bool(attempt.hosts) and 0 <= rank < attempt.world_size
    return str(attempt.hosts[rank * len(attempt.hosts) // attempt.world_size]) if is_known else ""
