"""How long communication takes, in seconds: rings within a node and across nodes. Pure; imports no torch.

The bandwidth terms are those of NCCL's own measure (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), the latency
terms those that NCCL chooses its algorithm by (github.com/NVIDIA/nccl, src/graph/tuning.cc).
"""

import math
from dataclasses import dataclass

from hpc.jobs.hardware import Machine


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them, each `stride`-th, on nodes of `devices`."""

    size: int
    stride: int
    devices: int

    @property
    def local(self) -> int:
        """Members on one node."""
        return min(self.size, max(1, self.devices // self.stride))

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.local)


def gather(size: float, group: Group, machine: Machine) -> float:
    """All-gather to, or reduce-scatter of, `size` bytes: (n - 1) / n of them in n - 1 steps."""
    if group.size == 1 or not size:
        return 0.0
    volume = size * (group.size - 1) / group.size
    return machine.network.start + _ring(group, machine) + volume / bandwidth(group, machine)


def reduce(size: float, group: Group, machine: Machine) -> float:
    """All-reduce of `size` bytes: reduce-scatter and all-gather, or a tree of nodes where latency counts for more."""
    if group.size == 1 or not size:
        return 0.0
    net = machine.network
    tree = (group.local - 1) * net.link_hop + math.log2(group.nodes) * net.hop
    volume = size * (group.size - 1) / group.size
    return net.start + 2 * min(_ring(group, machine), tree) + 2 * volume / bandwidth(group, machine)


def send(size: float, across: bool, devices: int, machine: Machine) -> float:
    """`size` bytes from each of a node's `devices` to one other, which is on the same node or not."""
    net = machine.network
    if not across:
        return net.start + net.link_hop + size / _link(machine)
    return net.start + net.hop + size * devices / _node(machine)


def bandwidth(group: Group, machine: Machine) -> float:
    """Bytes per second through a ring, which leaves each node once. Groups on the same node share what it sends."""
    if group.nodes == 1:
        return _link(machine)
    across = _node(machine) / max(1, group.devices // group.local)
    return across if group.local == 1 else min(_link(machine), across)


def _ring(group: Group, machine: Machine) -> float:
    """Its hops one after the other: one to the next node for each node but one, the others within nodes."""
    across = group.nodes - 1
    return (group.size - 1 - across) * machine.network.link_hop + across * machine.network.hop


def _link(machine: Machine) -> float:
    return machine.gpu.link_gbs * 1e9 * machine.network.link_share


def _node(machine: Machine) -> float:
    """What a node sends. Ask for more than one node only where this is known."""
    assert machine.node_gbs is not None
    return machine.node_gbs * 1e9 * machine.network.share
