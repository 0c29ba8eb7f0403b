"""The partitions, nodes and limits that a scheduler reports. Data only.

`slurm_inventory` and `pbs_inventory` ask for it; `hpc.submit.limits` compares a job with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Partition:
    """A partition of Slurm, or a queue of PBS. A limit that is None does not exist.

    Attributes:
        is_default: jobs that name no partition go to this one.
        is_up: its jobs are started.
        is_open: this user may name it, as far as its own settings show.
        is_preemptible: its jobs make room for those of others.
        is_exclusive: a job gets whole nodes, whatever it requests.
        qos: its own quality of service, whose limits come before those of the job's.
        qos_names: QoS that may be used in it; None if all may.
        destinations: of a queue that only passes jobs on, the queues to which it does.
    """

    name: str
    is_default: bool = False
    is_up: bool = True
    is_open: bool = True
    is_preemptible: bool = False
    max_seconds: int | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    is_exclusive: bool = False
    qos: str | None = None
    qos_names: frozenset[str] | None = None
    destinations: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one partition.

    Attributes:
        num_nodes: in any state, also those that are down.
        cpus: of a node, as the scheduler counts them: cores or hardware threads.
        memory_mb: of a node, in MiB.
        gpus: of a node, by their type; "" where the scheduler knows no type.
        features: names that a job can require. On PBS "resource=value".
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
    cluster: str = ""


@dataclass(frozen=True)
class Rules:
    """Settings of Slurm that decide which limits can be compared with a job.

    Attributes:
        cluster: its name.
        enforces_limits: those of accounts and QoS hold.
        checks_partitions: sbatch rejects a job that exceeds the limits of its partition.
        rewrites_jobs: the site has a plugin that may change a job's account, QoS and partition when it is submitted.
    """

    cluster: str = ""
    enforces_limits: bool = False
    checks_partitions: bool = False
    rewrites_jobs: bool = False


@dataclass(frozen=True)
class Inventory:
    """All that a scheduler reports.

    Attributes:
        associations: the accounts of this user.
        partition_word: how the scheduler's users call one: partition or queue.
        unanswered: commands that are missing, failed, or printed something else. Their parts are empty.
    """

    partitions: tuple[Partition, ...] = ()
    nodes: tuple[NodeGroup, ...] = ()
    associations: tuple[Association, ...] = ()
    qos: Mapping[str, QoS] = field(default_factory=dict)
    rules: Rules = Rules()
    partition_word: str = "partition"
    unanswered: tuple[str, ...] = ()

    def partitions_of(self, names: str | None) -> list[Partition]:
        """Return those that a job with this option may go to: one name, several with commas, None for the default."""
        words = (names or "").split(",")
        requested = [part for part in self.partitions if (part.name in words if names else part.is_default)]
        passed_on = {name for part in requested for name in part.destinations}
        return [part for part in requested if not part.destinations] + [
            part for part in self.partitions if part.name in passed_on
        ]

    def nodes_of(self, partitions: Sequence[Partition]) -> list[NodeGroup]:
        """Return the groups of nodes of these partitions."""
        names = {partition.name for partition in partitions}
        return [group for group in self.nodes if group.partition in names]


def parse_seconds(text: str) -> int | None:
    """Return the seconds of a limit as schedulers print it: D-HH:MM:SS, HH:MM:SS or MM:SS; None: no limit."""
    if text.lower() in ("infinite", "unlimited", "n/a", "none", ""):
        return None
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = ([0, 0] + [int(part) for part in clock.split(":")])[-3:]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
