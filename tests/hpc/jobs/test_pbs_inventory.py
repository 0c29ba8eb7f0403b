"""Check what is read from two PBS systems, as OpenPBS 23.06 has printed it, and what a job is told of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc.config.sections import ClusterConfig
from hpc.jobs import pbs_inventory
from hpc.jobs.inventory import Inventory
from hpc.jobs.job import Job
from hpc.submit import feasibility

FOLDER = Path(__file__).parent / "pbs_systems"
CLUSTER = ClusterConfig(name="mine", scheduler="pbs", memory_gb=60, launcher="pbs_tmrsh")


def system(name: str) -> Inventory:
    """Return an inventory from its recorded output."""
    return pbs_inventory.parse(*((FOLDER / f"{name}-{part}.txt").read_text() for part in ("queues", "server", "nodes")))


WHOLE, SHARED = system("whole_nodes"), system("shared_nodes")


def job(**changes: Any) -> Job:
    """Return a job of two nodes with four GPUs each, with these changes."""
    made = Job(
        name="run", cluster="mine", nodes=2, tasks_per_node=4, gpus_per_node=4, cores_per_task=16, memory_gb=60,
        walltime_seconds=3600, is_exclusive=False, account=None, partition=None, qos=None, constraint=None,
        request="ncpus=64:ngpus=4:mpiprocs=1", options=(), launcher="pbs_tmrsh", container=None, env={},
        interface=None, node_local=None, stage_env=False, chain=1, retries=3, arguments=(), mail=None, mail_on=(),
    )  # fmt: skip
    return replace(made, **changes)


def test_a_routing_queue_stands_for_its_destinations() -> None:
    assert [queue.name for queue in WHOLE.partitions_of(None)] == ["small", "medium"]
    small, medium = WHOLE.partitions_of("prod")
    assert (small.min_nodes, small.max_nodes, small.max_seconds) == (1, 2, 10800)
    assert (medium.min_nodes, medium.max_nodes, medium.max_seconds) == (3, 4, 21600)
    assert small.is_exclusive and not any(queue.is_exclusive for queue in SHARED.partitions)


def test_equal_nodes_are_counted() -> None:
    (group,) = WHOLE.nodes_of(WHOLE.partitions_of("debug"))
    assert (group.num_nodes, group.cpus, group.memory_mb, group.gpus) == (4, 64, 512 * 1024, {"": 4})
    assert group.features == {"system=polaris"} and group.example == "p1"


def test_nodes_belong_to_queues() -> None:
    (gpu,) = SHARED.nodes_of(SHARED.partitions_of("gpu"))  # by a resource that the queue adds to each request
    assert (gpu.num_nodes, gpu.gpus) == (2, {"": 4})
    (cpu,) = SHARED.nodes_of(SHARED.partitions_of(None))  # by the nodes' own attribute
    assert (cpu.partition, cpu.num_nodes, cpu.cpus, cpu.gpus) == ("cpu", 2, 128, {"": 0})


QUEUE = "Queue: q|queue_type=Execution|enabled=True|started=True\n"
NODE = "Name={0}|sharing=default_shared|resources_available.host={1}|resources_available.ncpus=8|\
resources_available.ngpus=2|resources_available.mem=1048576kb{2}\n"


def test_parts_of_one_host_are_added_up() -> None:
    parts = NODE.format("h[0]", "h", "|resources_available.gputype=A100") + NODE.format("h[1]", "h", "")
    (group,) = pbs_inventory.parse(QUEUE, "", parts).nodes
    assert (group.num_nodes, group.cpus, group.gpus, group.memory_mb) == (1, 16, {"": 4}, 2048)
    assert group.features == {"gputype=A100"}


def test_addresses_are_names() -> None:
    nodes = "".join(NODE.format(f"10.0.0.{number}", f"10.0.0.{number}", "") for number in range(4))
    (group,) = pbs_inventory.parse(QUEUE, "", nodes).nodes
    assert group.num_nodes == 4


def test_only_words_of_nodes_are_features() -> None:
    more = "|resources_available.tier0=x3002-g0|resources_available.eagle_fs=True|resources_available.scratch=1tb"
    (group,) = pbs_inventory.parse(QUEUE, "", NODE.format("h", "h", more)).nodes
    assert group.features == {"tier0=x3002-g0"}
    queue = QUEUE.replace("\n", "|default_chunk.mpiprocs=4|default_chunk.scratch=100gb\n")
    assert pbs_inventory.parse(queue, "", NODE.format("h", "h", more)).nodes


def test_a_queue_that_passes_jobs_to_another_server_has_no_known_limit() -> None:
    queues = QUEUE + "Queue: r|queue_type=Route|route_destinations=q,far@other|enabled=True|started=True\n"
    inventory = pbs_inventory.parse(queues, "", NODE.format("h", "h", ""))
    assert list(feasibility.problems_on_pbs(job(partition="r", nodes=1000), CLUSTER, inventory)) == []


@pytest.mark.parametrize(
    ("inventory", "changes"),
    [
        (WHOLE, {}),
        (WHOLE, {"nodes": 4, "walltime_seconds": 21600}),
        (WHOLE, {"constraint": "system=polaris"}),
        (WHOLE, {"partition": "debug"}),
        (WHOLE, {"partition": "main@other", "nodes": 1000}),  # of another server
        (WHOLE, {"constraint": "host=p1:scratch=100gb:eagle_fs=true"}),  # left to PBS
        (SHARED, {"partition": "gpu"}),
        (SHARED, {"request": "ncpus=64", "gpus_per_node": 0}),
        (Inventory(), {"partition": "any", "nodes": 1000}),
    ],
)
def test_what_can_start_is_not_rejected(inventory: Inventory, changes: dict[str, Any]) -> None:
    assert list(feasibility.problems_on_pbs(job(**changes), CLUSTER, inventory)) == []


REJECTED: list[tuple[Inventory, dict[str, Any], str]] = [
    (WHOLE, {"nodes": 5}, "trainer.num_nodes must be at most 4, the most nodes of a job in queue medium; got 5."),
    (
        WHOLE,
        {"walltime_seconds": 18000},
        "trainer.num_nodes must be at least 3, the fewest nodes of a job in queue medium; got 2.",
    ),
    (
        WHOLE,
        {"partition": "debug", "nodes": 3},
        "trainer.num_nodes must be at most 2, the most nodes of a job in queue debug; got 3.",
    ),
    (
        WHOLE,
        {"request": "ncpus=128:ngpus=4", "cores_per_task": 32},
        "cluster.cores_per_gpu must be at most 16, as 4 tasks share the 64 CPUs of a node in queue small or medium; "
        "got 32.",
    ),
    (
        WHOLE,
        {"memory_gb": 600},
        "cluster.memory_gb must be at most 512, the memory of a node in queue small or medium in GiB; got 60.",
    ),
    (
        WHOLE,
        {"constraint": "system=aurora"},
        "cluster.constraint must be features of nodes in queue small or medium: system=polaris; got system=aurora.",
    ),
    (WHOLE, {"partition": "gpu"}, "cluster.partition must be a queue of this cluster: small, medium, "),
    (SHARED, {}, "cluster.request must not ask for such GPUs, as no node in queue cpu has any; got "),
    (
        SHARED,
        {"partition": "gpu", "nodes": 3},
        "trainer.num_nodes must be at most 2, the number of nodes in queue gpu with the requested CPUs, memory, "
        "GPUs and features; got 3.",
    ),
    (
        SHARED,
        {"partition": "gpu", "request": "ncpus=8:ngpus=8", "gpus_per_node": 8, "tasks_per_node": 8},
        "trainer.devices must be at most 4, the number of GPUs of a node in queue gpu; got 8.",
    ),
]


@pytest.mark.parametrize(("inventory", "changes", "sentence"), REJECTED)
def test_what_would_wait_for_ever_is_told(inventory: Inventory, changes: dict[str, Any], sentence: str) -> None:
    problem, *others = feasibility.problems_on_pbs(job(**changes), CLUSTER, inventory)
    assert all(other.key == problem.key for other in others)
    assert str(problem).startswith(sentence)
