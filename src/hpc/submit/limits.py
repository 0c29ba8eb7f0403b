"""Compare a job with the limits that a scheduler tells: what it can never be given, key by key. Pure."""

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
FIRST_FLAG = "OverPartQOS"


def problems(job: Job, inventory: Inventory) -> list[ConfigError]:
    """Return why the job would wait for ever, one error for each key; none if it may start in one of its partitions.

    Slurm takes such a job, unless the site has set EnforcePartLimits or the flag DenyOnLimit.
    """
    lifted: frozenset[str] = frozenset()
    if inventory.rewrites_jobs:  # which account and QoS the job will have is not known
        lifted = lifted.union(*(qos.flags for qos in inventory.qos.values()))
        job, inventory = (
            replace(job, account=None, qos=None),
            replace(inventory, associations=(), enforces_limits=False),
        )
    of_job = [item for item in inventory.associations if job.account in (None, item.account)]
    partitions = sorted(inventory.partitions_of(job.partition), key=_generosity, reverse=True)
    pairs = product(partitions, of_job or [None])
    answers = (list(_pair_problems(job, partition, account, inventory, lifted)) for partition, account in pairs)
    return min(answers, key=len, default=[])


def _generosity(partition: Partition) -> tuple[float, float]:
    """Return by how much a partition allows: of several, the problems of the most generous one are told."""
    return partition.max_nodes or math.inf, partition.max_seconds or math.inf


def _pair_problems(
    job: Job, partition: Partition, association: Association | None, inventory: Inventory, lifted: frozenset[str]
) -> Iterator[ConfigError]:
    """Yield what exceeds the limits of one partition for one account.

    Args:
        lifted: flags that the job's QoS may have.
    """
    account = job.account or (association and association.account)
    qos_name = job.qos or (association and association.default_qos)
    where = f"in {inventory.partition_word} {partition.name}"
    for key, name, allowed in (
        ("account", account, partition.accounts),
        ("qos", qos_name, partition.qos_names),
    ):
        if name and allowed is not None and name not in allowed:
            names = ", ".join(sorted(allowed))
            rule = f"must be one of those that may be used {where}: {names}"
            fix = f"cluster.{key}={sorted(allowed)[0]}, or another {inventory.partition_word}"
            yield ConfigError(f"cluster.{key}", name, rule, fix)
    qos = inventory.qos.get(qos_name or "")
    yield from _partition_problems(job, partition, where, lifted | (qos.flags if qos else frozenset()))
    if inventory.enforces_limits:
        yield from _limit_problems(job, _ordered_limits(partition, qos, association, inventory.qos))


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
