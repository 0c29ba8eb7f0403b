"""How long collective communication takes, in seconds: rings within a node and across nodes. Pure; imports no torch.

The bandwidth terms are those of NCCL's own measure (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), the latency
terms those that NCCL chooses its algorithm by (github.com/NVIDIA/nccl, src/graph/tuning.cc).
"""

import math
from dataclasses import dataclass

from .hardware import Network


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: `size` of them, every `stride`-th rank, on nodes of `gpus_per_node`."""

    size: int
    stride: int
    gpus_per_node: int

    @property
    def local(self) -> int:
        """Members on one node."""
        return min(self.size, max(1, self.gpus_per_node // self.stride))

    @property
    def nodes(self) -> int:
        return math.ceil(self.size / self.local)


def bandwidth(group: Group, link_gbs: float, network: Network) -> float:
    """Bytes per second of a ring through all members.

    It enters and leaves each node once; groups that do so on the same node share what the node sends.
    """
    link = link_gbs * 1e9 * network.link_share
    if group.nodes == 1:
        return link
    sharing = group.gpus_per_node // group.local
    across = network.node_gbs * 1e9 * network.share / max(1, sharing)
    return across if group.local == 1 else min(link, across)


def gather(size: float, group: Group, link_gbs: float, network: Network) -> float:
    """All-gather to, or reduce-scatter of, `size` bytes: (n - 1) / n of them in n - 1 steps."""
    if group.size == 1:
        return 0.0
    volume = size * (group.size - 1) / group.size
    return _steps(group, network) + volume / bandwidth(group, link_gbs, network)


def reduce(size: float, group: Group, link_gbs: float, network: Network) -> float:
    """All-reduce of `size` bytes: a reduce-scatter and an all-gather, or a tree where latency counts more."""
    if group.size == 1:
        return 0.0
    volume = 2 * size * (group.size - 1) / group.size
    tree = 2 * ((group.local - 1) * network.link_hop + math.log2(max(1, group.nodes)) * network.hop)
    return network.start + min(2 * _hops(group, network), tree) + volume / bandwidth(group, link_gbs, network)


def send(size: float, link_gbs: float, network: Network, sharing: int, across: bool) -> float:
    """A message to one other rank; of ranks on its node, `sharing` send at the same time."""
    if across:
        return network.start + network.hop + size / (network.node_gbs * 1e9 * network.share / sharing)
    return network.start + network.link_hop + size / (link_gbs * 1e9 * network.link_share)


def _steps(group: Group, network: Network) -> float:
    return network.start + _hops(group, network)


def _hops(group: Group, network: Network) -> float:
    """A ring's hops, one after the other: those within nodes, and one to the next node for each node but one."""
    across = group.nodes - 1
    return (group.size - 1 - across) * network.link_hop + across * network.hop
