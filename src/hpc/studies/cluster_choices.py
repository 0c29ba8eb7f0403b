"""Which nodes with GPUs the file of a cluster can be for, the best choice first. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc.config.errors import ConfigError, join_names
from hpc.config.walltime import format_walltime
from hpc.jobs import hardware
from hpc.jobs.inventory import Inventory, NodeGroup, Partition

MIN_NODES_OF_DEFAULT = 4  # as trainer=ddp_4node needs; some sites' default partition is one node for tests
GPU_SLICE = re.compile(r"\dg\.\d+gb")  # in the type of a part of a GPU (MIG): a100_1g.5gb


@dataclass(frozen=True)
class Choice:
    """Equal nodes with GPUs for which a file can be written."""

    partition: Partition
    nodes: NodeGroup
    gpu_type: str
    num_gpus: int

    def is_same_as(self, other: "Choice") -> bool:
        """Return whether both are the same nodes of the same partition."""
        names = [(item.partition.name, item.nodes.example, item.gpu_type) for item in (self, other)]
        return names[0] == names[1]

    def __str__(self) -> str:
        gpus = f"{self.num_gpus} {self.gpu_type or 'GPUs'}"
        limits = [f"at most {format_walltime(self.partition.max_seconds)}"] if self.partition.max_seconds else []
        limits += [f"at most {self.partition.max_nodes} nodes of a job"] if self.partition.max_nodes else []
        return ", ".join([f"{self.partition.name}: {self.nodes.num_nodes} nodes with {gpus}", *limits])


def list_choices(inventory: Inventory) -> list[Choice]:
    """Return all nodes with GPUs, the best choice first.

    Last are partitions that this user may not name. Of the others, those whose jobs make room for others, and slices of
    GPUs, come after those that do not; then the default partition if it has a few nodes, then the most GPUs.
    """
    choices = [
        Choice(merge_destination_limits(partition, inventory), group, kind, count)
        for partition in inventory.partitions
        if partition.is_up
        for group in merge_similar(inventory.nodes_of(inventory.partitions_of(partition.name)))
        for kind, count in group.gpus.items()
        if count
    ]
    return sorted(choices, key=_rank, reverse=True)


def _rank(choice: Choice) -> tuple[bool, bool, bool, int]:
    partition, num_nodes = choice.partition, choice.nodes.num_nodes
    is_usual = partition.is_default and min(num_nodes, partition.max_nodes or num_nodes) >= MIN_NODES_OF_DEFAULT
    is_whole = not partition.is_preemptible and not GPU_SLICE.search(choice.gpu_type)
    return partition.is_open, is_whole, is_usual, num_nodes * choice.num_gpus


def merge_similar(groups: Sequence[NodeGroup]) -> list[NodeGroup]:
    """Return groups of nodes with the same CPUs and GPUs: their smallest memory, and the features that all have.

    Nodes of one kind may differ by some MiB and by the names of racks. A feature that names a GPU tells kinds apart.
    """
    merged: dict[Any, NodeGroup] = {}
    distinct = {group.example: group for group in groups}  # a node may be of several queues that a job is passed on to
    for group in distinct.values():
        models = frozenset(word for word in group.features if gpu_names(word))
        kind = (group.cpus, group.threads_per_core, tuple(sorted(group.gpus.items())), models)
        other = merged.get(kind, replace(group, num_nodes=0))
        merged[kind] = replace(
            other,
            num_nodes=other.num_nodes + group.num_nodes,
            memory_mb=min(other.memory_mb, group.memory_mb),
            features=other.features & group.features,
        )
    return list(merged.values())


def gpu_names(word: str) -> list[str]:
    """Return the names in hardware.yaml for which a feature may stand; on PBS it is "resource=value"."""
    return hardware.names_of_type(word.partition("=")[2] or word)


def merge_destination_limits(partition: Partition, inventory: Inventory) -> Partition:
    """Return a partition; a queue that passes jobs on gets the limits of the most generous of its destinations."""
    if not partition.destinations:
        return partition
    queues = inventory.partitions_of(partition.name)
    nodes, seconds = [queue.max_nodes for queue in queues], [queue.max_seconds for queue in queues]
    return replace(
        partition,
        max_nodes=None if None in nodes else max(filter(None, nodes), default=None),
        max_seconds=None if None in seconds else max(filter(None, seconds), default=None),
        is_exclusive=all(queue.is_exclusive for queue in queues),
    )


def choose(choices: Sequence[Choice], *, partition: str | None, gpu_type: str | None, word: str) -> Choice:
    """Return the first choice of this partition with this type of GPU. Raise `ConfigError` if there is none.

    Args:
        word: partition or queue.
    """
    if not choices:
        rule = f"must have a {word} that is up and whose nodes have GPUs, as the scheduler counts them"
        raise ConfigError("The cluster", None, rule, "a copy of configs/cluster/slurm.yaml or pbs.yaml, by hand")
    of_partition = [choice for choice in choices if partition in (None, choice.partition.name)]
    if not of_partition:
        names = list(dict.fromkeys(choice.partition.name for choice in choices))
        rule = f"must be one of those with GPUs: {', '.join(names)}"
        raise ConfigError("--partition", partition, rule, f"--partition {names[0]}")
    suitable = [choice for choice in of_partition if gpu_type in (None, choice.gpu_type)]
    if not suitable:
        kinds = sorted({choice.gpu_type for choice in of_partition if choice.gpu_type})
        where = f"{word} {of_partition[0].partition.name}"
        rule = f"must be one of the types that {where} has: {join_names(kinds) or 'none'}"
        raise ConfigError("--gpu", gpu_type, rule, f"--gpu {kinds[0]}" if kinds else "leave --gpu out")
    return suitable[0]


def subtract_reserved(choice: Choice, node: Mapping[str, str]) -> Choice:
    """Return a choice without the CPUs and the memory of a node that the site keeps for itself.

    Args:
        node: fields of `scontrol show node`; CPUEfctv since Slurm 22.05.
    """
    reserved_cpus = int(node.get("CoreSpecCount", 0)) * choice.nodes.threads_per_core
    cpus = int(node.get("CPUEfctv", choice.nodes.cpus - reserved_cpus))
    memory_mb = choice.nodes.memory_mb - int(node.get("MemSpecLimit", 0))
    return replace(choice, nodes=replace(choice.nodes, cpus=cpus, memory_mb=memory_mb))
