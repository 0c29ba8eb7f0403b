"""Check bandwidths, NCCL's log lines, warnings about slow links, and the file that the plan reads."""

from itertools import combinations
from typing import Any

import pytest

from hpc.config import compose, section_parser, sections
from hpc.launch import bandwidth, nccl_log
from hpc.launch.bandwidth import CollectiveTiming, Link

# Log lines of several NCCL versions, with host names and addresses replaced.
SOCKETS = """\
n1:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
n1:1:1 [0] NCCL INFO NET/IB : No device found.
n1:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.56.0.6<0>
n1:1:1 [0] NCCL INFO Using network Socket
n1:73:356 [0] NCCL INFO Channel 00/0 : 3[1] -> 0[0] [receive] via NET/Socket/0
n1:73:356 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
n1:74:357 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0 comm 0x2083dd50 nRanks 02
"""
INFINIBAND = """\
n1:31842:31905 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.0.4.19<0>
n1:31842:31905 [0] NCCL INFO NET/Socket : Using [0]ib0:10.0.4.19<0>
n1:31842:31905 [0] NCCL INFO Channel 00/0 : 3[3] -> 8[0] [send] via NET/IB/0/GDRDMA
n1:31842:31905 [0] NCCL INFO Channel 01/0 : 3[3] -> 8[0] [send] via NET/IB/1(2)/GDRDMA
"""
OLD = "n1:2771:2801 [0] NCCL INFO Ring 00 : 1 -> 0 [receive] via NET/IB/0\n"
PLUGIN = "n1:28:69 [2] NCCL INFO Channel 03 : 15[a01d0] -> 6[a01c0] [receive] via NET/AWS Libfabric/3/GDRDMA\n"
ONE_NODE = """\
n1:1:257 [0] NCCL INFO NET/Socket : Using [0]hsn0:10.1.0.1<0>
n1:1:257 [0] NCCL INFO Using network Socket
n1:1:1 [0] NCCL INFO Channel 30/0 : 0[0] -> 1[6] via P2P/CUMEM
"""


def summarize(scope: str, collective: str, num_ranks: int, size: int, seconds: list[float]) -> CollectiveTiming:
    return bandwidth.summarize_repeats(scope, collective, num_ranks=num_ranks, size_bytes=size, seconds=seconds)


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (SOCKETS, {"Socket"}),
        (INFINIBAND, {"IB with GPUDirect"}),
        (OLD, {"IB"}),
        (PLUGIN, {"AWS Libfabric with GPUDirect"}),
        (ONE_NODE, set()),  # the log names a network that is not used
    ],
)
def test_the_network_that_nccl_uses_is_read_from_its_words(log: str, found: set[str]) -> None:
    assert nccl_log.used_networks(log) == found


def test_why_nccl_has_no_other_network() -> None:
    assert nccl_log.failure_reasons(SOCKETS * 2) == [
        "NET/Plugin: Could not find: libnccl-net.so",
        "NET/IB : No device found",
    ]
    off = "n1:35113:35467 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"
    assert nccl_log.failure_reasons(off) == ["NCCL_IB_DISABLE set by environment to 1"]
    assert nccl_log.failure_reasons(INFINIBAND) == []


@pytest.mark.parametrize(
    ("ranks", "size", "seconds", "algorithm", "bus"),
    [
        (16, 1073741824, 0.02607, 41.187, 77.226),  # two nodes of 8 A100 over EFA
        (4, 134217728, 0.107800, 1.25, 1.87),  # two servers of 2 V100
    ],
)
def test_bandwidths_are_those_that_nccl_tests_print(
    ranks: int, size: int, seconds: float, algorithm: float, bus: float
) -> None:
    point = summarize("across", "all_reduce", ranks, size, [seconds] * 5)
    assert (point.algorithm_gbs, point.bus_gbs) == pytest.approx((algorithm, bus), rel=5e-3)
    half = summarize("across", "all_gather", ranks, size, [seconds] * 5)  # of an all-reduce
    assert half.bus_gbs == pytest.approx(point.bus_gbs / 2)


def test_a_point_is_a_median() -> None:
    assert summarize("within", "all_gather", 4, 1024, [9.0, 1.0, 2.0, 3.0, 4.0]).seconds == 3.0


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (2, 1), (2, 4), (5, 3)])
def test_every_rank_has_one_group_per_scope(nodes: int, per_node: int) -> None:
    groups = bandwidth.rank_groups(nodes, per_node)
    assert ("within" in groups, "across" in groups) == (per_node > 1, nodes > 1)
    for scope, some in groups.items():
        assert sorted(rank for group in some for rank in group) == list(range(nodes * per_node))
        for group in some:
            on = {rank // per_node for rank in group}
            assert len(on) == (1 if scope == "within" else nodes)


@pytest.mark.parametrize("nodes", range(2, 10))
def test_each_node_meets_two_neighbours_and_never_two_at_once(nodes: int) -> None:
    rounds = bandwidth.neighbour_rounds(nodes)
    if nodes == 2:
        assert rounds == []
        return
    for pairs in rounds:
        assert all(not set(a) & set(b) for a, b in combinations(pairs, 2))
    met = [node for pairs in rounds for pair in pairs for node in pair]
    assert sorted(met) == sorted([*range(nodes)] * 2)
    assert len({frozenset(pair) for pairs in rounds for pair in pairs}) == nodes


def test_a_slow_node_is_told_from_usual_ones() -> None:
    assert bandwidth.find_slow_nodes({"n1": 1.0, "n2": 1.1, "n3": 2.2, "n4": 1.1}) == {"n3": pytest.approx(2.0)}
    assert bandwidth.find_slow_nodes({"n1": 1.0, "n2": 3.0}) == {"n2": 3.0}
    assert bandwidth.find_slow_nodes({"n1": 1.0}) == {} == bandwidth.find_slow_nodes({})


def points(scope: str, ranks: int, *seconds: float) -> list[CollectiveTiming]:
    sizes = [1024 << 10 * k for k in range(len(seconds))]
    return [
        summarize(scope, name, ranks, size, [took, took])
        for name in bandwidth.BUS_FACTORS
        for size, took in zip(sizes, seconds, strict=True)
    ]


def test_the_table_fits_and_has_every_number() -> None:
    lines = bandwidth.timing_table(points("within", 4, 2.5e-5, 1e-2, 1.5) + points("across", 2, 3e-3, 0.5, 5e-3))
    assert max(map(len, lines)) <= 120 and len({len(line) for line in lines if "|" in line}) == 1
    assert len(lines) == 2 * (2 + 3)
    assert "1 MiB |    10 ms 0.1049 0.1573  |" in lines[3]


def cluster(**facts: Any) -> sections.ClusterConfig:
    cfg = compose.compose_overrides([f"cluster.{key}={value}" for key, value in facts.items()], personal=False)
    return section_parser.read_section("cluster", cfg.cluster)


def test_the_nominal_figures_are_those_of_a_gpu_and_of_a_node() -> None:
    links = {"within": Link(150.0, 1e-5, 4, ["n1"], ""), "across": Link(20.0, 3e-5, 2, ["n1", "n2"], "")}
    known = bandwidth.compare_with_cluster(links, cluster(gpu_link_gbs=300, network_gbs=100), ranks_per_node=4)
    assert known == [
        "inside a node: 150 GB/s per rank, 50% of cluster.gpu_link_gbs=300",
        "across nodes: 20 GB/s per rank, 80 GB/s per node, 80% of cluster.network_gbs=100",
    ]
    unknown = bandwidth.compare_with_cluster(links | {"within": None}, cluster(), ranks_per_node=4)
    assert unknown[0] == "inside a node: not measured, there is one rank per node"
    assert "cluster.network_gbs is null" in unknown[1] and "%" not in unknown[1]


def test_a_link_has_the_latency_of_the_smallest_message_and_the_bandwidth_of_the_largest() -> None:
    link = bandwidth.link_from_timings(points("within", 4, 2.5e-5, 1e-2), "within", nodes=["n1"], date="2026-02-01")
    assert link and link.gbs == pytest.approx(1.5 * 1048576 / 1e-2 / 1e9) and link.latency == 2.5e-5
