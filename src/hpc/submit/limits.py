"""Compare a job with the limits that a scheduler reports: what it can never be given, key by key. Pure."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

from hpc.config.errors import ConfigError
from hpc.config.walltime import format_walltime
from hpc.jobs.inventory import Association, Inventory, Limits, Partition, QoS
from hpc.jobs.job import Job

# Flags of a QoS: limits of a partition that it lifts, and that its own come first (Slurm: resource_limits, sacctmgr).
TIME_FLAG, NODES_FLAG, MIN_NODES_FLAG = "PartitionTimeLimit", "PartitionMaxNodes", "PartitionMinNodes"
LIFTING_FLAGS = frozenset({TIME_FLAG, NODES_FLAG, MIN_NODES_FLAG})
FIRST_FLAG = "OverPartQOS"


def problems(job: Job, inventory: Inventory, *, is_accepted: bool) -> list[ConfigError]:
    """Return why the job would wait for ever, one error for each key; none if it may start in one of its partitions.

    Accounts are not compared: Slurm itself rejects a wrong one, and an allowed account stands for those below it.

    Args:
        is_accepted: whether sbatch would take the job; then limits that it checks itself are not compared.
    """
    if is_accepted and inventory.rules.checks_partitions:
        inventory = replace(inventory, partitions=tuple(map(_without_limits, inventory.partitions)))
    if inventory.rules.rewrites_jobs:  # which account and QoS the job will have is not known
        job = replace(job, account=None, qos=None)
        inventory = replace(inventory, associations=(), rules=replace(inventory.rules, enforces_limits=False))
    job = replace(job, account=job.account and job.account.lower(), qos=job.qos and job.qos.lower())  # as Slurm does
    of_job = [item for item in inventory.associations if job.account in (None, item.account)]
    partitions = sorted(inventory.partitions_of(job.partition), key=_limit_key, reverse=True)
    pairs = product(partitions, of_job or [None])
    answers = (list(_pair_problems(job, partition, account, inventory)) for partition, account in pairs)
    return min(answers, key=len, default=[])


def _without_limits(partition: Partition) -> Partition:
    return replace(partition, max_seconds=None, max_nodes=None, min_nodes=0, qos_names=None)


def _limit_key(partition: Partition) -> tuple[float, float]:
    """Return the limits of a partition: of several, the problems of the most generous one are reported."""
    return partition.max_nodes or math.inf, partition.max_seconds or math.inf


def _pair_problems(
    job: Job, partition: Partition, association: Association | None, inventory: Inventory
) -> Iterator[ConfigError]:
    """Yield what exceeds the limits of one partition for one account."""
    qos_name = job.qos or (association and association.default_qos)
    where = f"in {inventory.partition_word} {partition.name}"
    if qos_name and partition.qos_names is not None and qos_name not in partition.qos_names:
        names = ", ".join(sorted(partition.qos_names))
        rule = f"must be one of those that may be used {where}: {names}"
        fix = f"cluster.qos={min(partition.qos_names)}, or another {inventory.partition_word}"
        yield ConfigError("cluster.qos", qos_name, rule, fix)
    qos = inventory.qos.get(qos_name or "")
    yield from _partition_problems(job, partition, where, qos.flags if qos else _possible_flags(qos_name, inventory))
    if inventory.rules.enforces_limits:
        yield from _limit_problems(job, _ordered_limits(partition, qos, association, inventory.qos))


def _possible_flags(qos_name: str | None, inventory: Inventory) -> frozenset[str]:
    """Return the flags that a job's QoS may have if its name is not known, or nothing is known of it."""
    if inventory.rules.rewrites_jobs and inventory.qos:
        return frozenset().union(*(qos.flags for qos in inventory.qos.values()))
    return LIFTING_FLAGS if qos_name or inventory.rules.rewrites_jobs else frozenset()


def _partition_problems(job: Job, partition: Partition, where: str, flags: frozenset[str]) -> Iterator[ConfigError]:
    where = f"of a job {where}"
    if partition.max_seconds is not None and TIME_FLAG not in flags:
        yield from _time_problems(job, partition.max_seconds, where)
    if partition.max_nodes is not None and job.nodes > partition.max_nodes and NODES_FLAG not in flags:
        rule = f"must be at most {partition.max_nodes}, the most nodes {where}"
        yield ConfigError("trainer.num_nodes", job.nodes, rule, f"trainer.num_nodes={partition.max_nodes}")
    if job.nodes < partition.min_nodes and MIN_NODES_FLAG not in flags:
        rule = f"must be at least {partition.min_nodes}, the fewest nodes {where}"
        yield ConfigError("trainer.num_nodes", job.nodes, rule, f"trainer.num_nodes={partition.min_nodes}")


def _ordered_limits(
    partition: Partition, qos: QoS | None, association: Association | None, all_qos: Mapping[str, QoS]
) -> list[tuple[str, Limits]]:
    """Return the limits in Slurm's order, of which the first that is set counts, and where each is from."""
    of_partition = all_qos.get(partition.qos or "")
    by_qos = [(f"qos {item.name}", item.limits) for item in (of_partition, qos) if item]
    if qos and FIRST_FLAG in qos.flags:
        by_qos.reverse()
    return by_qos + ([(f"account {association.account}", association.limits)] if association else [])


def _limit_problems(job: Job, limits: list[tuple[str, Limits]]) -> Iterator[ConfigError]:
    """Yield what exceeds the first limit that is set, of time and of each resource."""
    for source, limit in limits:
        if limit.max_seconds is not None:
            yield from _time_problems(job, limit.max_seconds, f"of a job with {source}")
            break
    runs = job.nodes * job.runs_per_node
    gpus, cpus = runs * job.gpus_per_node, runs * job.tasks_per_node * (job.cores_per_task or 1)
    for name, number, key, unit in (
        ("node", job.nodes, "trainer.num_nodes", "nodes"),
        ("gres/gpu", gpus, "trainer.num_nodes x trainer.devices", "GPUs"),
        ("cpu", cpus, "the number of devices x cluster.cores_per_gpu", "CPUs"),
    ):
        set_by = next(((where, limit.resources[name]) for where, limit in limits if name in limit.resources), None)
        if set_by and number > set_by[1]:
            rule = f"must be at most {set_by[1]}, the most {unit} of a job with {set_by[0]}"
            yield ConfigError(key, number, rule, f"fewer {unit}, or another cluster.qos= or cluster.account=")


def _time_problems(job: Job, max_seconds: int, where: str) -> Iterator[ConfigError]:
    if job.walltime_seconds > max_seconds:
        longest = format_walltime(max_seconds)
        rule = f"must be at most {longest}, the longest time {where}"
        yield ConfigError("cluster.time", format_walltime(job.walltime_seconds), rule, f"cluster.time={longest}")
