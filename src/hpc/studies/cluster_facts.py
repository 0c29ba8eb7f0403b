"""What the file of a cluster needs, from what its scheduler and one of its nodes tell. Pure."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc.config.errors import ConfigError, join_names
from hpc.config.sections import ClusterConfig
from hpc.config.walltime import format_walltime, walltime_seconds
from hpc.jobs import hardware
from hpc.jobs.inventory import Inventory, NodeGroup, Partition
from hpc.studies.node_probe import ProbedNode
from hpc.submit.node_limits import GPU_TYPE

MIN_NODES_OF_DEFAULT = 4  # as trainer=ddp_4node needs; some sites' default partition is one node for tests
GPU_SLICE = re.compile(r"\dg\.\d+gb")  # in the type of a part of a GPU (MIG): a100_1g.5gb
DEFAULT_SECONDS = walltime_seconds("cluster.time", ClusterConfig.time)  # if the file does not set it


@dataclass(frozen=True)
class Fact:
    """A key of a cluster's file.

    Attributes:
        value: None if it is unknown.
        source: the command that has told it, or what to do if it is unknown.
    """

    key: str
    value: str | int | float | bool | None
    source: str


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


def collect(choice: Choice, inventory: Inventory, *, scheduler: str, probed: ProbedNode | None) -> list[Fact]:
    """Return the facts of a cluster's file, in its order, from the partition on.

    Args:
        probed: what a job has seen on a node; None if there was none.
    """
    asked = ("scontrol show partition", "sinfo") if scheduler == "slurm" else ("qstat -Qf", "pbsnodes -av")
    partitions, nodes = asked
    job = "as a job has seen it on a node"
    partition, group = choice.partition, choice.nodes
    facts = []
    if not partition.is_default:
        facts += [Fact("partition", partition.name, partitions)]
    qos = list(_qos_facts(partition, inventory))
    facts += qos
    if constraint := _distinguishing_feature(choice, inventory):
        facts += [Fact("constraint", constraint, f"{nodes}: only these of its nodes have it")]
    longest = _longest_seconds(partition, qos, inventory)
    if longest < DEFAULT_SECONDS:
        facts += [Fact("time", format_walltime(int(longest)), "the longest time of a job")]
    cores = group.cpus // choice.num_gpus
    threads = f", {group.threads_per_core} hardware threads of a core" if group.threads_per_core > 1 else ""
    facts += [Fact("gpus_per_node", choice.num_gpus, nodes), _gpu_fact(choice, probed, nodes)]
    facts += [Fact("cores_per_gpu", cores, f"{nodes}: {group.cpus} CPUs of a node{threads}")]
    facts += [_request_fact(choice, scheduler, nodes)]
    if scheduler == "pbs":
        facts += [Fact("launcher", "pbs_tmrsh", "part of every PBS; some sites have a faster mpiexec")]
    if partition.is_exclusive:
        facts += [Fact("memory_gb", 0 if scheduler == "slurm" else None, f"{partitions}: a job gets whole nodes")]
        facts += [Fact("whole_nodes", True, f"{partitions}: nodes are not shared")]
    else:
        facts += [Fact("memory_gb", group.memory_mb // 1024, f"{nodes}: {group.memory_mb} MiB of a node")]
    ask = "unknown; --job starts a short job that finds it"
    known = probed or ProbedNode()
    facts += [Fact("network_gbs", known.network_gbs, job if known.network_gbs else f"{ask}, and plan.py needs it")]
    facts += [Fact("interface", known.interface, job if known.interface else f"{ask}; null: NCCL and Gloo choose")]
    return facts


def _qos_facts(partition: Partition, inventory: Inventory) -> Iterator[Fact]:
    """Yield the QoS that a job must name, if that of the user's account may not be used in the partition."""
    defaults = {item.default_qos for item in inventory.associations if item.default_qos}
    if partition.qos_names is None or not defaults or defaults & partition.qos_names:
        return
    allowed = sorted({name for item in inventory.associations for name in item.qos_names} & partition.qos_names)
    if len(allowed) == 1:
        yield Fact("qos", allowed[0], "scontrol show partition, sacctmgr: the only one that you may use here")
    else:
        yield Fact("qos", None, f"one of {', '.join(allowed) or 'none of yours'}, by scontrol show partition, sacctmgr")


def _longest_seconds(partition: Partition, qos: Sequence[Fact], inventory: Inventory) -> float:
    """Return the longest time of a job in the partition, with the QoS that it must name, or the user's default one."""
    names = [str(fact.value) for fact in qos] or [item.default_qos or "" for item in inventory.associations[:1]]
    of_qos = [inventory.qos[name].limits.max_seconds for name in names if name in inventory.qos]
    return min((limit for limit in [partition.max_seconds, *of_qos] if limit is not None), default=math.inf)


def _distinguishing_feature(choice: Choice, inventory: Inventory) -> str | None:
    """Return a feature that only these nodes have, if jobs could also get nodes with another number of GPUs or CPUs.

    GPUs with a type need none: the job's request names the type.
    """
    groups = merge_similar(inventory.nodes_of(inventory.partitions_of(choice.partition.name)))
    others = [group for group in groups if group.example != choice.nodes.example and any(group.gpus.values())]
    if choice.gpu_type or not others:
        return None
    shared = frozenset(feature for group in others for feature in group.features)
    return min(choice.nodes.features - shared, default=None)


def _gpu_fact(choice: Choice, probed: ProbedNode | None, source: str) -> Fact:
    """Return the GPU's name in hardware.yaml, if one name alone fits the type in GRES, or else the nodes' features."""
    if probed and probed.gpu:
        gpu = hardware.gpu_from_device_name(probed.gpu)
        if gpu:
            return Fact("gpu", gpu.name, f"{probed.gpu}, as a job has seen it on a node")
        return Fact("gpu", None, f"{probed.gpu}, which hpc/jobs/hardware.yaml does not have; plan.py needs it")
    words = [choice.gpu_type] if choice.gpu_type else sorted(choice.nodes.features)
    names = sorted({name for word in words for name in gpu_names(word)})
    if len(names) == 1:
        return Fact("gpu", names[0], f"{source}: {join_names(words)}")
    told = f"one of {join_names(names)}" if names else f"the nodes have {join_names(words) or 'no features'}"
    return Fact("gpu", None, f"unknown, {told}; --job starts a short job that finds it, and plan.py needs it")


def _request_fact(choice: Choice, scheduler: str, source: str) -> Fact:
    if scheduler == "pbs":
        return Fact("request", "ncpus={cores}:ngpus={gpus}:mpiprocs=1", source)
    kind = f"{choice.gpu_type}:" if choice.gpu_type else ""
    return Fact("request", f"--gres=gpu:{kind}{{gpus}}", f"{source}: gpu:{kind}{choice.num_gpus}")


def is_same_request(one: str, other: str) -> bool:
    """Return whether two requests name the same type of GPU, or one of them names none."""
    kinds = [GPU_TYPE.findall(text) for text in (one, other)]
    return not all(kinds) or kinds[0] == kinds[1]
