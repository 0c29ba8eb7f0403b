"""Collectives that were timed, judged: bandwidths as nccl-tests define them, a table, what is slow. Pure; no torch."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpc.config.sections import ClusterConfig
from hpc.launch.measured_links import Link

# What a rank's link carries of each byte of a message, times (n - 1) / n for n ranks: "bus bandwidth" of nccl-tests,
# doc/PERFORMANCE.md (github.com/NVIDIA/nccl-tests). It compares with the hardware's, however many ranks there are.
ON_THE_BUS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
SCOPES = {"within": "inside a node", "across": "across nodes"}
SLOW = 1.3  # times the median of all nodes


@dataclass(frozen=True)
class Point:
    """One collective at one message size. Times are of one call, by the slowest of all ranks."""

    scope: str  # within: the ranks of a node, all nodes at once; across: one rank per node, all of these groups at once
    collective: str
    ranks: int  # in a group
    size: int  # bytes; of what is gathered or scattered the whole, as nccl-tests count
    seconds: float  # median
    low: float  # first quartile
    high: float  # third quartile

    @property
    def algorithm_gbs(self) -> float:
        """Size / time, in GB/s (doc/PERFORMANCE.md)."""
        return self.size / self.seconds / 1e9

    @property
    def bus_gbs(self) -> float:
        """What one rank's link carries in one direction, in GB/s (doc/PERFORMANCE.md)."""
        return self.algorithm_gbs * ON_THE_BUS[self.collective] * (self.ranks - 1) / self.ranks

    @property
    def spread(self) -> float:
        """The middle half of the repeats, as a part of the median."""
        return (self.high - self.low) / self.seconds


def point(scope: str, collective: str, ranks: int, size: int, seconds: Sequence[float]) -> Point:
    """From at least two repeats."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Point(scope, collective, ranks, size, middle, low, high)


def groups(nodes: int, per_node: int) -> dict[str, list[list[int]]]:
    """Per scope the groups of ranks that measure at the same time; without a scope in which nobody has a partner."""
    ranks = [list(range(node * per_node, (node + 1) * per_node)) for node in range(nodes)]
    found = {"within": ranks, "across": [list(rail) for rail in zip(*ranks, strict=True)]}
    return {scope: some for scope, some in found.items() if len(some[0]) > 1}


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Each node beside its two neighbours on a ring, in rounds in which no node comes twice; of two nodes, nothing.

    One slow node makes a collective of all nodes slow. Beside its neighbours it shows which one it is.
    """
    if nodes < 3:
        return []
    ring = [(node, (node + 1) % nodes) for node in range(nodes)]
    last = [ring.pop()] if nodes % 2 else []
    return [some for some in (ring[::2], ring[1::2], last) if some]


def slow(seconds: Mapping[str, float]) -> dict[str, float]:
    """Nodes that take longer than the others, and how many times the median."""
    usual = statistics.median_low(seconds.values()) if seconds else 0.0
    return {node: took / usual for node, took in seconds.items() if took > SLOW * usual}


def link(points: Iterable[Point], scope: str, nodes: list[str], date: str) -> Link | None:
    """The two numbers that a model of communication needs; None: nothing was measured there."""
    known = sorted((p for p in points if (p.scope, p.collective) == (scope, "all_reduce")), key=lambda p: p.size)
    return Link(known[-1].bus_gbs, known[0].seconds, known[0].ranks, nodes, date) if known else None


def table(points: Sequence[Point]) -> list[str]:
    """Per scope a line for each size: time, algorithm and bus bandwidth in GB/s, and the spread of the time."""
    lines = []
    for scope, words in SCOPES.items():
        some = {(p.size, p.collective): p for p in points if p.scope == scope}
        if not some:
            continue
        ranks = next(iter(some.values())).ranks
        heads = "".join(f" | {name:^29}" for name in ON_THE_BUS)
        lines += [f"{f'{words}, {ranks} ranks':>22}{heads}"]
        lines += [f"{'size':>22}" + f" | {'time':>8} {'algbw':>6} {'busbw':>6} {'±':>5} " * len(ON_THE_BUS)]
        for size in sorted({size for size, _ in some}):
            cells = (_cell(some[size, name]) for name in ON_THE_BUS)
            lines += [f"{_bytes(size):>22}" + "".join(f" | {cell} " for cell in cells)]
    return lines


def compared(links: Mapping[str, Link | None], per_node: int, cluster: ClusterConfig) -> list[str]:
    """Each scope beside what the cluster's file says, or what that does not say."""
    lines = []
    nominal = {"within": ("gpu_link_gbs", cluster.gpu_link_gbs), "across": ("network_gbs", cluster.network_gbs)}
    for scope, (key, gbs) in nominal.items():
        if (found := links[scope]) is None:
            one = "rank per node" if scope == "within" else "node"
            lines += [f"{SCOPES[scope]}: not measured, there is one {one}"]
            continue
        said, total = f"{SCOPES[scope]}: {found.gbs:.3g} GB/s per rank", found.gbs
        if scope == "across" and per_node > 1:  # network_gbs is that of the whole node
            total *= per_node
            said += f", {total:.3g} GB/s per node"
        told = f", {total / gbs:.0%} of cluster.{key}={gbs:g}" if gbs else f" (to compare it: cluster.{key} is null)"
        lines += [said + told]
    return lines


def _cell(point: Point) -> str:
    time = f"{point.seconds * 1e6:.4g} us" if point.seconds < 1e-3 else f"{point.seconds * 1e3:.4g} ms"
    return f"{time:>8} {_gbs(point.algorithm_gbs):>6} {_gbs(point.bus_gbs):>6} {point.spread:5.0%}"


def _gbs(value: float) -> str:
    return f"{value:.4f}" if value < 1 else f"{value:.4g}"


def _bytes(size: int) -> str:
    power = min((size.bit_length() - 1) // 10, 3)
    return f"{size >> 10 * power} {('B', 'KiB', 'MiB', 'GiB')[power]}"
