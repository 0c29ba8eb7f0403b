"""Compare a job with the partitions of the cluster: what no node, and no partition, can ever give it. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence

from hpc.config.errors import ConfigError, closest_word
from hpc.config.sections import ClusterConfig
from hpc.config.walltime import format_walltime
from hpc.jobs.job import Job
from hpc.jobs.slurm_partitions import NodeGroup

KEYS_OF_NODES = "trainer.devices, cluster.cores_per_gpu, cluster.memory_gb, cluster.constraint"
MIB_PER_GIB = 1024  # Slurm's G of --mem is 1024 of its M
GPU_TYPE = re.compile(r"(?:gpu:|gpus-per-node=)([A-Za-z][\w.-]*):\d")  # in --gres=gpu:a100:4, --gpus-per-node=h100:4
ALL_FEATURES = re.compile(r"[\w.-]+(?:&[\w.-]+)*")  # of --constraint; other expressions are left to sbatch


def problems(job: Job, cluster: ClusterConfig, groups: Sequence[NodeGroup]) -> Iterator[ConfigError]:
    """Yield why Slurm could never start the job, one error for each key."""
    names = (job.partition or "").split(",")
    of_job = [group for group in groups if (group.partition in names if job.partition else group.is_default)]
    if job.partition and not of_job:
        known = list(dict.fromkeys(group.partition for group in groups))
        rule = f"must be one of the partitions of this cluster: {', '.join(known)}"
        fix = f"cluster.partition={closest_word(job.partition, known, known[0])}"
        yield ConfigError("cluster.partition", job.partition, rule, fix)
    if of_job:  # without a default partition, sbatch says so
        yield from _partition_problems(job, of_job)
        yield from _node_problems(job, cluster, of_job)


def _partition_problems(job: Job, groups: Sequence[NodeGroup]) -> Iterator[ConfigError]:
    """Yield what exceeds the limits of every partition that the job may go to."""
    where = _where(groups)
    limits = [group.max_seconds for group in groups if group.max_seconds is not None]
    if len(limits) == len(groups) and job.walltime_seconds > max(limits):
        longest = format_walltime(max(limits))
        rule = f"must be at most {longest}, the longest time of a job {where}"
        yield ConfigError("cluster.time", format_walltime(job.walltime_seconds), rule, f"cluster.time={longest}")
    sizes = _count_nodes(groups)
    most = max(min(sizes[group.partition], group.max_nodes or sizes[group.partition]) for group in groups)
    least = min(group.min_nodes for group in groups)
    if job.nodes > most:
        rule = f"must be at most {most}, the most nodes of a job {where}"
        yield ConfigError("trainer.num_nodes", job.nodes, rule, f"trainer.num_nodes={most}")
    elif job.nodes < least:
        rule = f"must be at least {least}, the fewest nodes of a job {where}"
        yield ConfigError("trainer.num_nodes", job.nodes, rule, f"trainer.num_nodes={least}")


def _node_problems(job: Job, cluster: ClusterConfig, groups: Sequence[NodeGroup]) -> Iterator[ConfigError]:
    """Yield what no node of these has; or how many have all of it, if these are too few."""
    needs = list(_needs(job, cluster, groups))
    lacking = [error for has, error in needs if not any(map(has, groups))]
    yield from lacking
    suitable = [group for group in groups if all(has(group) for has, _ in needs)]
    if lacking:
        return
    most = max(_count_nodes(suitable).values(), default=0)
    if most < min(job.nodes, max(_count_nodes(groups).values())):
        rule = f"must be at most {most}: so many nodes {_where(groups)} have all that is asked for"
        fix = f"trainer.num_nodes={most}" if most else f"smaller values of {KEYS_OF_NODES}"
        yield ConfigError("trainer.num_nodes", job.nodes, rule, fix)


Need = tuple[Callable[[NodeGroup], bool], ConfigError]  # whether a node has it, and the error where none has


def _needs(job: Job, cluster: ClusterConfig, groups: Sequence[NodeGroup]) -> Iterator[Need]:
    """Yield what each node of the job must have."""
    where, tasks = _where(groups), job.tasks_per_node
    cpus_needed, cpus = tasks * (job.cores_per_task or 1), max(group.cpus for group in groups)
    rule = f"must be at most {cpus // tasks}, as {tasks} tasks share the {cpus} CPUs of a node {where}"
    fix = f"cluster.cores_per_gpu={cpus // tasks}"
    error = ConfigError("cluster.cores_per_gpu", job.cores_per_task, rule, fix)
    yield (lambda group: group.cpus >= cpus_needed), error
    if job.memory_gb:
        memory_mb, most_gb = job.memory_gb * MIB_PER_GIB, max(group.memory_mb for group in groups) // MIB_PER_GIB
        rule = f"must be at most {most_gb}, the memory of a node {where} in GiB"
        error = ConfigError("cluster.memory_gb", cluster.memory_gb, rule, f"cluster.memory_gb={most_gb}")
        yield (lambda group: group.memory_mb >= memory_mb), error
    if job.request and job.gpus_per_node:
        yield _gpu_need(job, job.request, groups)
    if job.constraint and ALL_FEATURES.fullmatch(job.constraint):
        features = frozenset(job.constraint.split("&"))
        known = ", ".join(sorted({feature for group in groups for feature in group.features})) or "none"
        rule = f"must name features of nodes {where}, which are {known}"
        error = ConfigError("cluster.constraint", job.constraint, rule, "cluster.constraint=null, or one of these")
        yield (lambda group: features <= group.features), error


def _gpu_need(job: Job, request: str, groups: Sequence[NodeGroup]) -> Need:
    """Return that a node has so many GPUs, of the type that `cluster.request` names."""
    where, match = _where(groups), GPU_TYPE.search(request)
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
        rule = f"asks for GPUs, and no node {where} has such ones"
        error = ConfigError("cluster.request", request, rule, "another cluster.partition=")
    return (lambda group: count(group) >= job.gpus_per_node), error


def _count_nodes(groups: Sequence[NodeGroup]) -> dict[str, int]:
    """Return the number of nodes by partition."""
    counts: dict[str, int] = {}
    for group in groups:
        counts[group.partition] = counts.get(group.partition, 0) + group.num_nodes
    return counts


def _where(groups: Sequence[NodeGroup]) -> str:
    return f"in partition {' or '.join(dict.fromkeys(group.partition for group in groups))}"
