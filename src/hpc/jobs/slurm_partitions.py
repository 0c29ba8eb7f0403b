"""The partitions of a Slurm cluster and their nodes, as sinfo reports them. Parsing is pure; `query` asks.

Columns are named by `--format`, which prints the same in all versions. The JSON of sinfo has other keys in each.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc.jobs.job_states import run_command

# Partition, availability, time limit, nodes of a job, nodes, CPUs, sockets:cores:threads, memory, GRES, features.
COLUMNS = "%P|%a|%l|%s|%D|%c|%z|%m|%G|%f"
# Also partitions that are hidden from this user; and equal nodes only, as otherwise "8+" stands for 8 and 16 CPUs.
COMMAND = ("sinfo", "--all", "--exact", "--noheader", f"--format={COLUMNS}")
GPU = re.compile(r"\bgpu(?::([^:,()]+))?:(\d+)")  # gpu:4, gpu:a100:4(S:0-1)


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one partition.

    Attributes:
        is_default: jobs that name no partition go to this one.
        is_up: jobs of the partition are started.
        max_seconds: the longest wall time of a job; None: no limit.
        max_nodes: the most nodes of a job; None: no limit.
        num_nodes: in any state, also those that are down.
        cpus: of a node, as Slurm counts them: cores or hardware threads.
        memory_mb: of a node, in MiB.
        gpus: of a node, by their type in GRES; "" where GRES has no type.
    """

    partition: str
    is_default: bool
    is_up: bool
    max_seconds: int | None
    min_nodes: int
    max_nodes: int | None
    num_nodes: int
    cpus: int
    threads_per_core: int
    memory_mb: int
    gpus: Mapping[str, int]
    features: frozenset[str]


def query() -> list[NodeGroup] | None:
    """Return all groups of nodes; None if sinfo is missing, does not answer, or prints something else."""
    answer = run_command(*COMMAND)
    if answer is None or answer.returncode:
        return None
    try:
        return parse(answer.stdout)
    except ValueError:
        return None


def parse(text: str) -> list[NodeGroup]:
    """Return the groups in the output of `COMMAND`. Raise `ValueError` if it has other columns."""
    return [_parse_line(line) for line in text.splitlines() if line.strip()]


def _parse_line(line: str) -> NodeGroup:
    name, available, limit, size, count, cpus, layout, memory, gres, features = (
        part.strip() for part in line.split("|")
    )
    least, _, most = size.partition("-")
    gpus: dict[str, int] = {}
    for kind, number in GPU.findall(gres):
        gpus[kind] = gpus.get(kind, 0) + int(number)
    return NodeGroup(
        partition=name.rstrip("*"),
        is_default=name.endswith("*"),
        is_up=available == "up",
        max_seconds=parse_time_limit(limit),
        min_nodes=int(least),
        max_nodes=None if most == "infinite" else int(most or least),
        num_nodes=int(count),
        cpus=int(cpus),
        threads_per_core=int(layout.split(":")[2]),
        memory_mb=int(memory),
        gpus=gpus,
        features=frozenset() if features == "(null)" else frozenset(features.split(",")),
    )


def parse_time_limit(text: str) -> int | None:
    """Return the seconds of a limit as sinfo and sacctmgr print it: D-HH:MM:SS, HH:MM:SS or MM:SS; None: no limit."""
    if text.lower() in ("infinite", "unlimited", "n/a", ""):
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
