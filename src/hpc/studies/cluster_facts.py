"""What the file of a cluster needs, from what its scheduler and one of its nodes report. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc.config.errors import join_names
from hpc.config.sections import ClusterConfig
from hpc.config.walltime import format_walltime, walltime_seconds
from hpc.jobs import hardware
from hpc.jobs.inventory import Inventory, Partition
from hpc.studies.cluster_choices import Choice, gpu_names, merge_similar
from hpc.studies.node_probe import ProbedNode
from hpc.submit.node_limits import GPU_TYPE

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


def list_facts(choice: Choice, inventory: Inventory, *, scheduler: str, probed: ProbedNode | None) -> list[Fact]:
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
