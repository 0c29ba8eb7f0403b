"""Compare what each node of a job needs with the nodes of its partitions. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence

from hpc.config.errors import ConfigError
from hpc.config.sections import ClusterConfig
from hpc.jobs.inventory import Inventory, NodeGroup
from hpc.jobs.job import Job

KEYS_OF_NODES = "trainer.devices, cluster.cores_per_gpu, cluster.memory_gb, cluster.constraint"
MIB_PER_GIB = 1024  # Slurm's G of --mem is 1024 of its M
GPU_TYPE = re.compile(r"(?:gpu:|gpus-per-node=)([\w.-]+):")  # in --gres=gpu:a100:4 and --gpus-per-node=h100:4
# Features that nodes must all have: `a&b` of Slurm, `a=1:b=2` of PBS. Other expressions are left to the scheduler.
ALL_FEATURES = re.compile(r"[\w.=-]+(?:[&:][\w.=-]+)*")

Need = tuple[Callable[[NodeGroup], bool], ConfigError]  # whether a node has it, and the error where none has


def problems(job: Job, cluster: ClusterConfig, inventory: Inventory) -> list[ConfigError]:
    """Return what no node of the job's partitions has; or how many nodes have all of it, if these are too few."""
    partitions = inventory.partitions_of(job.partition)
    groups = inventory.nodes_of(partitions)
    if not groups:
        return []
    where = f"in {inventory.partition_word} {' or '.join(partition.name for partition in partitions)}"
    needs = list(_needs(job, cluster, groups, where))
    if lacking := [error for has, error in needs if not any(map(has, groups))]:
        return lacking
    suitable = [group for group in groups if all(has(group) for has, _ in needs)]
    most = max((count_nodes(suitable, part.name) for part in partitions), default=0)
    if job.nodes <= most:
        return []
    rule = f"must be at most {most}, the number of nodes {where} with the requested CPUs, memory, GPUs and features"
    fix = f"trainer.num_nodes={most}" if most else f"smaller values of {KEYS_OF_NODES}"
    return [ConfigError("trainer.num_nodes", job.nodes, rule, fix)]


def count_nodes(groups: Sequence[NodeGroup], partition: str) -> int:
    """Return the number of nodes of a partition in these groups."""
    return sum(group.num_nodes for group in groups if group.partition == partition)


def _needs(job: Job, cluster: ClusterConfig, groups: Sequence[NodeGroup], where: str) -> Iterator[Need]:
    """Yield what each node of the job must have."""
    tasks = job.tasks_per_node * job.runs_per_node
    cpus_needed, cpus = count_cpus(job, cluster), max(group.cpus for group in groups)
    if cpus >= tasks:
        rule = f"must be at most {cpus // tasks}, as {tasks} tasks share the {cpus} CPUs of a node {where}"
        fix = f"cluster.cores_per_gpu={cpus // tasks}"
        error = ConfigError("cluster.cores_per_gpu", job.cores_per_task, rule, fix)
    else:
        rule = f"must be at most {cpus}, the CPUs of a node {where}"
        error = ConfigError("trainer.devices", tasks, rule, f"trainer.devices={cpus}")
    yield (lambda group: group.cpus >= cpus_needed), error
    if job.memory_gb:
        memory_mb, most_gb = job.memory_gb * MIB_PER_GIB, max(group.memory_mb for group in groups) // MIB_PER_GIB
        rule = f"must be at most {most_gb}, the memory of a node {where} in GiB"
        error = ConfigError("cluster.memory_gb", cluster.memory_gb, rule, f"cluster.memory_gb={most_gb}")
        yield (lambda group: group.memory_mb >= memory_mb), error
    if job.request and job.gpus_per_node and (cluster.scheduler == "slurm" or "ngpus=" in job.request):
        yield _gpu_need(job, job.request, groups, where)
    if job.constraint and (error := _feature_error(job.constraint, groups, where)):
        yield (lambda group: _required_features(job.constraint or "", groups) <= group.features), error


def _required_features(constraint: str, groups: Sequence[NodeGroup]) -> frozenset[str]:
    """Return the features that a node must have, as far as they can be compared.

    Other expressions are left to the scheduler; so are, on PBS, resources that are no words of a node.
    """
    if not ALL_FEATURES.fullmatch(constraint):
        return frozenset()
    resources = {feature.partition("=")[0] for group in groups for feature in group.features}
    words = re.split("[&:]", constraint)
    return frozenset(word for word in words if "=" not in word or word.partition("=")[0] in resources)


def _feature_error(constraint: str, groups: Sequence[NodeGroup], where: str) -> ConfigError | None:
    if not _required_features(constraint, groups):
        return None
    known = ", ".join(sorted({feature for group in groups for feature in group.features})) or "none"
    rule = f"must be features of nodes {where}: {known}"
    return ConfigError("cluster.constraint", constraint, rule, "cluster.constraint=null, or one of these")


def count_cpus(job: Job, cluster: ClusterConfig) -> int:
    """Return the CPUs that the job asks for on each node. On PBS they are a part of `cluster.request`."""
    if cluster.scheduler == "slurm":
        return job.tasks_per_node * job.runs_per_node * (job.cores_per_task or 1)
    match = re.search(r"\bncpus=(\d+)", job.request or "")
    return int(match[1]) if match else 1


def _gpu_need(job: Job, request: str, groups: Sequence[NodeGroup], where: str) -> Need:
    """Return that a node has so many GPUs, of the type that `cluster.request` names."""
    match = GPU_TYPE.search(request)
    kinds = sorted({kind for group in groups for kind in group.gpus if kind})

    def count(group: NodeGroup) -> int:
        return sum(number for kind, number in group.gpus.items() if not match or kind == match[1])

    most = max(map(count, groups))
    if match and kinds and not most:
        rule = f"must name a type of GPU that nodes {where} have: {', '.join(kinds)}"
        fix = f"{request.replace(match[1], kinds[0])} as the request of the cluster's file"
        error = ConfigError("cluster.request", request, rule, fix)
    elif most:
        rule = f"must be at most {most}, the number of GPUs of a node {where}"
        fix = f"trainer.devices={most}, and gpus_per_node in the cluster's file"
        error = ConfigError("trainer.devices", job.tasks_per_node, rule, fix)
    else:
        rule = f"must not ask for such GPUs, as no node {where} has any"
        error = ConfigError("cluster.request", request, rule, "another cluster.partition=")
    return (lambda group: count(group) >= job.gpus_per_node * job.runs_per_node), error
