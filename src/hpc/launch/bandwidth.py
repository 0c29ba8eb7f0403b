"""Bandwidths of timed collectives as nccl-tests define them, a table of them, and slow nodes. Imports no torch."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpc.config.sections import ClusterConfig

# Bytes that a rank's link carries for each byte of a message, times (n - 1) / n for n ranks: "bus bandwidth" of
# nccl-tests, doc/PERFORMANCE.md (github.com/NVIDIA/nccl-tests). For any n it compares with the hardware's bandwidth.
BUS_FACTORS = {"all_reduce": 2, "all_gather": 1}
SCOPES = {"within": "inside a node", "across": "across nodes"}
SLOW_FACTOR = 1.3  # a node that takes longer than so many times the median of all nodes is slow


@dataclass(frozen=True)
class Link:
    """A link as all-reduce sees it, with all GPUs of the nodes busy at once."""

    gbs: float  # bus bandwidth per GPU at the largest message, GB/s in one direction
    latency: float  # seconds of a call with the smallest message
    ranks: int  # in one call
    nodes: list[str]
    date: str


@dataclass(frozen=True)
class CollectiveTiming:
    """One collective at one message size. Times are of one call, by the slowest of all ranks."""

    scope: str  # within: the ranks of a node, all nodes at once; across: one rank per node, all of these groups at once
    collective: str
    ranks: int  # in a group
    size: int  # bytes of the message; the whole of what is gathered, as nccl-tests count
    seconds: float  # median of the repeats

    @property
    def algorithm_gbs(self) -> float:
        """Size / time, in GB/s (doc/PERFORMANCE.md)."""
        return self.size / self.seconds / 1e9

    @property
    def bus_gbs(self) -> float:
        """Bandwidth that one rank's link carries in one direction, in GB/s (doc/PERFORMANCE.md)."""
        return self.algorithm_gbs * BUS_FACTORS[self.collective] * (self.ranks - 1) / self.ranks


def summarize_repeats(
    scope: str, collective: str, *, num_ranks: int, size_bytes: int, seconds: Sequence[float]
) -> CollectiveTiming:
    """Return the median of the seconds of the repeats."""
    return CollectiveTiming(scope, collective, num_ranks, size_bytes, statistics.median(seconds))


def rank_groups(num_nodes: int, ranks_per_node: int) -> dict[str, list[list[int]]]:
    """Return per scope the groups of ranks that measure at the same time, without scopes whose groups have one rank."""
    by_node = [list(range(node * ranks_per_node, (node + 1) * ranks_per_node)) for node in range(num_nodes)]
    groups = {"within": by_node, "across": [list(ranks) for ranks in zip(*by_node, strict=True)]}
    return {scope: ranks for scope, ranks in groups.items() if len(ranks[0]) > 1}


def neighbour_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pair each node with its two neighbours on a ring, in rounds in which no node comes twice. Two nodes: no rounds.

    One slow node makes a collective of all nodes slow. Paired with its neighbours, it shows which one it is.
    """
    if num_nodes < 3:
        return []
    ring = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    last = [ring.pop()] if num_nodes % 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def find_slow_nodes(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the nodes that take longer than the others, each with how many times the median it takes."""
    median = statistics.median_low(seconds.values()) if seconds else 0.0
    return {node: elapsed / median for node, elapsed in seconds.items() if elapsed > SLOW_FACTOR * median}


def link_from_timings(timings: Iterable[CollectiveTiming], scope: str, *, nodes: list[str], date: str) -> Link | None:
    """Return bandwidth (largest message) and latency (smallest) of all-reduce in a scope; None if none was measured."""
    reduces = [timing for timing in timings if (timing.scope, timing.collective) == (scope, "all_reduce")]
    if not reduces:
        return None
    smallest, largest = min(reduces, key=lambda t: t.size), max(reduces, key=lambda t: t.size)
    return Link(largest.bus_gbs, smallest.seconds, smallest.ranks, nodes, date)


def timing_table(timings: Sequence[CollectiveTiming]) -> list[str]:
    """Return per scope a line for each size: time, algorithm and bus bandwidth in GB/s."""
    lines = []
    for scope, description in SCOPES.items():
        cells = {(timing.size, timing.collective): timing for timing in timings if timing.scope == scope}
        if not cells:
            continue
        num_ranks = next(iter(cells.values())).ranks
        heads = "".join(f" | {name:^23}" for name in BUS_FACTORS)
        lines += [f"{f'{description}, {num_ranks} ranks':>22}{heads}"]
        lines += [f"{'size':>22}" + f" | {'time':>8} {'algbw':>6} {'busbw':>6} " * len(BUS_FACTORS)]
        for size in sorted({size for size, _ in cells}):
            row = (_format_cell(cells[size, name]) for name in BUS_FACTORS)
            lines += [f"{_format_bytes(size):>22}" + "".join(f" | {cell} " for cell in row)]
    return lines


def compare_with_cluster(links: Mapping[str, Link | None], cluster: ClusterConfig, *, ranks_per_node: int) -> list[str]:
    """Return a line per scope: the measured bandwidth, and its part of the nominal one in the cluster's file."""
    lines = []
    nominal = {"within": ("gpu_link_gbs", cluster.gpu_link_gbs), "across": ("network_gbs", cluster.network_gbs)}
    for scope, (key, nominal_gbs) in nominal.items():
        if (link := links[scope]) is None:
            unit = "rank per node" if scope == "within" else "node"
            lines += [f"{SCOPES[scope]}: not measured, there is one {unit}"]
            continue
        line, gbs = f"{SCOPES[scope]}: {link.gbs:.3g} GB/s per rank", link.gbs
        if scope == "across" and ranks_per_node > 1:  # network_gbs is the bandwidth of the whole node
            gbs *= ranks_per_node
            line += f", {gbs:.3g} GB/s per node"
        if nominal_gbs:
            line += f", {gbs / nominal_gbs:.0%} of cluster.{key}={nominal_gbs:g}"
        else:
            line += f" (to compare it: cluster.{key} is null)"
        lines += [line]
    return lines


def _format_cell(timing: CollectiveTiming) -> str:
    seconds = timing.seconds
    time = f"{seconds * 1e6:.4g} us" if seconds < 1e-3 else f"{seconds * 1e3:.4g} ms"
    return f"{time:>8} {_format_gbs(timing.algorithm_gbs):>6} {_format_gbs(timing.bus_gbs):>6}"


def _format_gbs(value: float) -> str:
    return f"{value:.4f}" if value < 1 else f"{value:.4g}"


def _format_bytes(size: int) -> str:
    power = min((size.bit_length() - 1) // 10, 3)
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"
