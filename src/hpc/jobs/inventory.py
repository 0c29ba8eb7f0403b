"""What a scheduler tells of its machine: partitions, nodes, and the limits of this user. Data only.

`slurm_inventory` and `pbs_inventory` ask for it; `hpc.submit.limits` compares a job with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Partition:
    """A partition of Slurm, or a queue of PBS. A limit that is None does not exist.

    Attributes:
        is_default: jobs that name no partition go to this one.
        is_up: its jobs are started.
        is_exclusive: a job gets whole nodes, whatever it asks for.
        qos: its own quality of service, whose limits come before those of the job's.
        accounts: that may use it; None: all.
        qos_names: that may be used in it; None: all.
        destinations: of a queue that only passes jobs on, the queues to which it does.
        is_direct: a job may name it.
    """

    name: str
    is_default: bool = False
    is_up: bool = True
    max_seconds: int | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    is_exclusive: bool = False
    qos: str | None = None
    accounts: frozenset[str] | None = None
    qos_names: frozenset[str] | None = None
    destinations: tuple[str, ...] = ()
    is_direct: bool = True


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one partition.

    Attributes:
        num_nodes: in any state, also those that are down.
        cpus: of a node, as the scheduler counts them: cores or hardware threads.
        memory_mb: of a node, in MiB.
        gpus: of a node, by their type; "" where the scheduler knows no type.
        example: the name of one of the nodes.
    """

    partition: str
    num_nodes: int
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]
    features: frozenset[str] = frozenset()
    threads_per_core: int = 1
    example: str = ""


@dataclass(frozen=True)
class Limits:
    """The most that one job may have; None: no limit. In `resources`: "node", "cpu", "gres/gpu", "gres/gpu:a100"."""

    max_seconds: int | None = None
    resources: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class QoS:
    """A quality of service of Slurm. Its flags say which other limits it lifts."""

    name: str
    limits: Limits
    flags: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Association:
    """An account of this user, as Slurm's database has it; `partition` is None where it is for all."""

    account: str
    partition: str | None
    default_qos: str | None
    qos_names: frozenset[str]
    limits: Limits


@dataclass(frozen=True)
class Inventory:
    """All that a scheduler tells.

    Attributes:
        associations: the accounts of this user.
        enforces_limits: whether those of accounts and QoS hold.
        rewrites_jobs: the site has a plugin that may change a job's account, QoS and partition when it is submitted.
        partition_word: how the scheduler's users call one: partition or queue.
        unanswered: commands that are missing, failed, or printed something else. Their parts are empty.
    """

    partitions: tuple[Partition, ...] = ()
    nodes: tuple[NodeGroup, ...] = ()
    associations: tuple[Association, ...] = ()
    qos: Mapping[str, QoS] = field(default_factory=dict)
    enforces_limits: bool = False
    rewrites_jobs: bool = False
    partition_word: str = "partition"
    unanswered: tuple[str, ...] = ()

    def partitions_of(self, names: str | None) -> list[Partition]:
        """Return those that a job with this option may go to: one name, several with commas, None for the default."""
        words = (names or "").split(",")
        asked = [part for part in self.partitions if (part.name in words if names else part.is_default)]
        passed_on = {name for part in asked for name in part.destinations}
        return [part for part in asked if not part.destinations] + [
            part for part in self.partitions if part.name in passed_on
        ]

    def nodes_of(self, partitions: list[Partition]) -> list[NodeGroup]:
        """Return the groups of nodes of these partitions."""
        names = {partition.name for partition in partitions}
        return [group for group in self.nodes if group.partition in names]
