"""Times of collectives in rings within a node and across nodes. Pure; imports no torch.

The bandwidth terms are those of NCCL's own measure (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), the latency
terms those that NCCL chooses its algorithm by (github.com/NVIDIA/nccl, src/graph/tuning.cc).
"""

import math
from dataclasses import dataclass

from hpc.jobs.hardware import Machine


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them, each `stride`-th, on nodes of `devices` GPUs."""

    size: int
    stride: int
    devices: int

    @property
    def ranks_per_node(self) -> int:
        return min(self.size, max(1, self.devices // self.stride))

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.size / self.ranks_per_node)


def gather_seconds(size: float, group: Group, machine: Machine) -> float:
    """Return the time of an all-gather to, or a reduce-scatter of, `size` bytes: (n - 1) / n of them in n - 1 steps."""
    if group.size == 1 or not size:
        return 0.0
    volume = size * (group.size - 1) / group.size
    return machine.network.start_seconds + _ring_latency(group, machine) + volume / ring_bandwidth(group, machine)


def all_reduce_seconds(size: float, group: Group, machine: Machine) -> float:
    """Return the time of an all-reduce of `size` bytes.

    It is a reduce-scatter and an all-gather, or a tree of nodes if that has a lower latency.
    """
    if group.size == 1 or not size:
        return 0.0
    network = machine.network
    tree_latency = (group.ranks_per_node - 1) * network.link_hop_seconds
    tree_latency += math.log2(group.num_nodes) * network.node_hop_seconds
    latency = min(_ring_latency(group, machine), tree_latency)
    volume = size * (group.size - 1) / group.size
    return network.start_seconds + 2 * latency + 2 * volume / ring_bandwidth(group, machine)


def ring_bandwidth(group: Group, machine: Machine) -> float:
    """Return the bytes per second of a ring, which leaves each node once. Groups on the same nodes share its links."""
    if group.num_nodes == 1:
        return _link_bandwidth(machine)
    across = _node_bandwidth(machine) / max(1, group.devices // group.ranks_per_node)
    return across if group.ranks_per_node == 1 else min(_link_bandwidth(machine), across)


def _ring_latency(group: Group, machine: Machine) -> float:
    """Return the latency of all hops of a ring: one hop to the next node per node but one, all others within nodes."""
    num_across = group.num_nodes - 1
    num_within = group.size - 1 - num_across
    return num_within * machine.network.link_hop_seconds + num_across * machine.network.node_hop_seconds


def _link_bandwidth(machine: Machine) -> float:
    return machine.gpu.link_gbs * 1e9 * machine.network.link_share


def _node_bandwidth(machine: Machine) -> float:
    """Return the bytes per second that a node sends. It must be known where there is more than one node."""
    assert machine.node_gbs is not None
    return machine.node_gbs * 1e9 * machine.network.node_share
