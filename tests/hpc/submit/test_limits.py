"""Check that a job which no partition or node can ever give what it asks for is told so, key by key."""

from dataclasses import replace
from typing import Any

import pytest

from hpc.config.sections import ClusterConfig
from hpc.jobs import slurm_partitions
from hpc.jobs.job import Job
from hpc.submit import limits

# As sinfo 22.05 has printed them for four partitions of a cluster that a test has made.
SINFO = """\
gpu*|up|1-00:00:00|1-4|8|16|2:4:2|64000|gpu:a100:4|a100,ib
gpu*|up|1-00:00:00|1-4|2|16|2:4:2|128000|gpu:a100:8(S:0-1)|a100,ib,large
old|up|2:00:00|1-infinite|2|8|8:1:1|32000|gpu:2|old
cpu|up|infinite|1-infinite|100|128|2:64:1|256000|(null)|(null)
"""
GROUPS = slurm_partitions.parse(SINFO)
CLUSTER = ClusterConfig(name="mine", scheduler="slurm", memory_gb=60)


def job(**changes: Any) -> Job:
    """Return a job of two nodes with four GPUs each that fits into the default partition, with these changes."""
    made = Job(
        name="run", cluster="mine", nodes=2, tasks_per_node=4, gpus_per_node=4, cores_per_task=4, memory_gb=60,
        walltime_seconds=3600, is_exclusive=False, account=None, partition=None, qos=None, constraint=None,
        request="--gres=gpu:a100:4", options=(), launcher="srun", container=None, env={}, interface=None,
        node_local=None, stage_env=False, chain=1, retries=3, arguments=(),
    )  # fmt: skip
    return replace(made, **changes)


def test_groups_are_read_as_sinfo_prints_them() -> None:
    first, large, old, cpu = GROUPS
    assert (first.partition, first.is_default, first.max_seconds, first.max_nodes) == ("gpu", True, 86400, 4)
    assert (first.cpus, first.threads_per_core, first.memory_mb, first.gpus) == (16, 2, 64000, {"a100": 4})
    assert large.gpus == {"a100": 8} and large.features == {"a100", "ib", "large"}
    assert (old.is_default, old.max_seconds, old.max_nodes, old.gpus) == (False, 7200, None, {"": 2})
    assert cpu.max_seconds is None and not cpu.gpus and not cpu.features


@pytest.mark.parametrize("text", ["gpu up 1-00:00:00 8 idle n[1-8]\n", "gpu|up|1:00:00|1|8|16+|2:4:2|1|x|y|z\n"])
def test_other_columns_are_not_guessed(text: str) -> None:
    with pytest.raises(ValueError):
        slurm_partitions.parse(text)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"partition": "old", "request": "--gpus-per-node=2", "gpus_per_node": 2, "tasks_per_node": 2, "memory_gb": 30},
        {"partition": "gpu,old"},
        {"constraint": "a100&ib"},
        {"constraint": "[rack1|rack2]*2"},  # left to sbatch
        {"gpus_per_node": 8, "tasks_per_node": 8, "cores_per_task": 2, "request": "--gres=gpu:a100:8"},
    ],
)
def test_what_can_start_is_not_rejected(changes: dict[str, Any]) -> None:
    assert list(limits.problems(job(**changes), CLUSTER, GROUPS)) == []


REJECTED: list[tuple[dict[str, Any], str, str]] = [
    ({"partition": "gpus"}, "cluster.partition", "cluster.partition=gpu"),
    ({"walltime_seconds": 86401}, "cluster.time", "cluster.time=24:00:00"),
    ({"nodes": 5}, "trainer.num_nodes", "trainer.num_nodes=4"),
    (
        {"partition": "old", "nodes": 3, "request": None, "memory_gb": 30, "cores_per_task": 2},
        "trainer.num_nodes",
        "trainer.num_nodes=2",
    ),
    ({"cores_per_task": 8}, "cluster.cores_per_gpu", "cluster.cores_per_gpu=4"),
    ({"memory_gb": 200}, "cluster.memory_gb", "cluster.memory_gb=125"),
    ({"request": "--gres=gpu:h100:4"}, "cluster.request", "--gres=gpu:a100:4"),
    ({"gpus_per_node": 16, "request": "--gpus-per-node=16"}, "trainer.devices", "trainer.devices=8"),
    ({"partition": "cpu", "request": "--gres=gpu:4"}, "cluster.request", "another cluster.partition="),
    ({"constraint": "h100"}, "cluster.constraint", "cluster.constraint=null"),
    ({"constraint": "large", "nodes": 4}, "trainer.num_nodes", "trainer.num_nodes=2"),
    ({"constraint": "large", "nodes": 4, "memory_gb": 100}, "trainer.num_nodes", "trainer.num_nodes=2"),
]


@pytest.mark.parametrize(("changes", "key", "fix"), REJECTED)
def test_what_can_never_start_is_told_by_its_key(changes: dict[str, Any], key: str, fix: str) -> None:
    (problem,) = limits.problems(job(**changes), CLUSTER, GROUPS)
    assert problem.key == key and fix in str(problem)


def test_all_of_them_are_told_at_once() -> None:
    problems = limits.problems(job(nodes=9, memory_gb=500, walltime_seconds=10**6), CLUSTER, GROUPS)
    assert [problem.key for problem in problems] == ["cluster.time", "trainer.num_nodes", "cluster.memory_gb"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("infinite", None), ("UNLIMITED", None), ("30:00", 1800), ("2:00:00", 7200), ("1-00:00:00", 86400), ("", None)],
)
def test_limits_are_seconds(text: str, seconds: int | None) -> None:
    assert slurm_partitions.parse_time_limit(text) == seconds
