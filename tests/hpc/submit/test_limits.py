"""Check that a job which a inventory can never give what it asks for is told so, key by key."""

from dataclasses import replace
from typing import Any

import pytest

from hpc.config.sections import ClusterConfig
from hpc.jobs import slurm_inventory
from hpc.jobs.inventory import Inventory, Limits, QoS, Rules, parse_seconds
from hpc.jobs.job import Job
from hpc.submit import limits, node_limits

# As Slurm 22.05 has printed them for clusters that tests have made.
PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A DefaultTime=NONE \
MaxNodes=4 MaxTime=1-00:00:00 MinNodes=0 Nodes=g[1-10] OverSubscribe=NO State=UP TotalCPUs=160 TRES=cpu=160,mem=1G
PartitionName=old AllowAccounts=science,other AllowQos=normal,debug Default=NO QoS=part Hidden=YES MaxNodes=UNLIMITED \
MaxTime=02:00:00 MinNodes=2 OverSubscribe=EXCLUSIVE State=DOWN
PartitionName=cpu AllowAccounts=ALL AllowQos=ALL Default=NO QoS=N/A MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 \
OverSubscribe=FORCE:4 State=UP
"""
NODES = """\
gpu*|8|16|2:4:2|64000|gpu:a100:4|a100,ib|g[1-8]
gpu*|2|16|2:4:2|128000|gpu:a100:8(S:0-1)|a100,ib,large|g[9-10]
old|2|8|8:1:1|32000|gpu:2|old|o1,p[7-9]
cpu|100|128|2:64:1|256000|(null)|(null)|c001
"""
ASSOCIATIONS = "test|science|||debug,normal||cpu=4000|\ntest|other|gpu||long,x|12:00:00||gres/gpu=64\n"
QOS = "normal|||||\n"
INVENTORY = Inventory(
    slurm_inventory.parse_partitions(PARTITIONS),
    slurm_inventory.parse_nodes(NODES),
    slurm_inventory.parse_associations(ASSOCIATIONS),
    slurm_inventory.parse_qos(QOS),
    Rules(enforces_limits=True),
)
CLUSTER = ClusterConfig(name="mine", scheduler="slurm", memory_gb=60)


def job(**changes: Any) -> Job:
    """Return a job of two nodes with four GPUs each that fits into the default partition, with these changes."""
    made = Job(
        name="run", cluster="mine", nodes=2, tasks_per_node=4, gpus_per_node=4, cores_per_task=4, memory_gb=60,
        walltime_seconds=3600, is_exclusive=False, account=None, partition=None, qos=None, constraint=None,
        request="--gres=gpu:a100:4", options=(), launcher="srun", container=None, env={}, interface=None,
        node_local=None, stage_env=False, chain=1, retries=3, arguments=(), mail=None, mail_on=(),
    )  # fmt: skip
    return replace(made, **changes)


def test_partitions_are_read_as_scontrol_prints_them() -> None:
    gpu, old, cpu = INVENTORY.partitions
    assert (gpu.name, gpu.is_default, gpu.is_up, gpu.max_seconds, gpu.min_nodes, gpu.max_nodes) == (
        "gpu", True, True, 86400, 0, 4,
    )  # fmt: skip
    assert (gpu.qos, gpu.qos_names, gpu.is_exclusive, gpu.is_open) == (None, None, False, True)
    assert (old.qos, old.qos_names, old.is_open) == ("part", {"normal", "debug"}, False)  # it is hidden
    assert (old.is_default, old.is_up, old.is_exclusive, old.max_seconds, old.max_nodes) == (
        False, False, True, 7200, None,
    )  # fmt: skip
    assert (cpu.max_seconds, cpu.is_exclusive) == (None, False)


def test_a_partition_of_a_group_is_open_to_its_members() -> None:
    text = PARTITIONS.splitlines()[0].replace("AllowGroups=ALL", "AllowGroups=lab,staff")
    for groups, is_open in ((frozenset({"lab", "x"}), True), (frozenset({"x"}), False)):
        assert slurm_inventory.parse_partitions(text, groups=groups)[0].is_open is is_open


def test_nodes_are_read_as_sinfo_prints_them() -> None:
    first, large, old, cpu = INVENTORY.nodes
    assert (first.partition, first.num_nodes, first.cpus, first.threads_per_core) == ("gpu", 8, 16, 2)
    assert (first.memory_mb, first.gpus, first.example) == (64000, {"a100": 4}, "g1")
    assert large.gpus == {"a100": 8} and large.features == {"a100", "ib", "large"}
    assert (old.gpus, old.example) == ({"": 2}, "o1")
    assert not cpu.gpus and not cpu.features and cpu.example == "c001"


def test_accounts_and_their_limits_are_read_as_sacctmgr_prints_them() -> None:
    science, other = INVENTORY.associations
    assert (science.account, science.partition, science.default_qos) == ("science", None, "normal")
    assert science.qos_names == {"debug", "normal"} and science.limits == Limits(None, {"cpu": 4000})
    assert (other.partition, other.default_qos) == ("gpu", None)
    assert other.limits == Limits(43200, {"gres/gpu": 64})


def test_of_a_qos_the_smallest_limit_counts() -> None:
    text = "debug|DenyOnLimit,OverPartQOS|00:30:00|gres/gpu=8,node=2,mem=100G|node=1|gres/gpu=4\n"
    (debug,) = slurm_inventory.parse_qos(text).values()
    assert debug.limits == Limits(1800, {"gres/gpu": 4, "node": 1})  # mem has a unit, and is not compared
    assert debug.flags == {"DenyOnLimit", "OverPartQOS"}


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (slurm_inventory.parse_nodes, "gpu up 1-00:00:00 8 idle n[1-8]\n"),
        (slurm_inventory.parse_nodes, "gpu|8|16+|2:4:2|1|x|y|z\n"),
        (slurm_inventory.parse_partitions, "PartitionName=gpu State=UP\n"),
        (slurm_inventory.parse_associations, "science|normal\n"),
        (slurm_inventory.parse_qos, "debug|x|00:30:00\n"),
    ],
)
def test_other_columns_are_not_guessed(parse: Any, text: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        parse(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("infinite", None), ("UNLIMITED", None), ("30:00", 1800), ("2:00:00", 7200), ("1-00:00:00", 86400), ("", None)],
)
def test_limits_are_seconds(text: str, seconds: int | None) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("names", "first"), [("g[003-010,12],h1", "g003"), ("n1", "n1"), ("a[1-2]b", "a1b"), ("x1,y[2-3]", "x1")]
)
def test_the_first_name_of_a_list(names: str, first: str) -> None:
    assert slurm_inventory.first_name(names) == first


def test_what_the_configuration_says_of_limits_and_plugins() -> None:
    text = "AccountingStorageEnforce = associations,{}\nClusterName = test\nEnforcePartLimits = {}\n{} = {}\n"
    rules = slurm_inventory.parse_rules(text.format("limits,qos", "NO", "JobSubmitPlugins", "(null)"))
    assert rules == Rules("test", enforces_limits=True, checks_partitions=False, rewrites_jobs=False)
    rules = slurm_inventory.parse_rules(text.format("safe", "ALL", "CliFilterPlugins", "lua"))
    assert rules == Rules("test", enforces_limits=True, checks_partitions=True, rewrites_jobs=True)
    assert not slurm_inventory.parse_rules(text.format("qos", "NO", "x", "y")).enforces_limits
    assert not slurm_inventory.parse_rules("AccountingStorageEnforce = none\n").enforces_limits


def test_accounts_on_other_clusters_of_the_database_are_left_out() -> None:
    both = replace(INVENTORY, rules=Rules("test"), associations=slurm_inventory.parse_associations(
        ASSOCIATIONS + ASSOCIATIONS.replace("test|", "cloud|")
    ))  # fmt: skip
    assert slurm_inventory.leave_out_other_clusters(both).associations == INVENTORY.associations


def test_a_single_qos_is_the_default() -> None:
    (item,) = slurm_inventory.parse_associations("test|a|||long|||\n")
    assert item.default_qos == "long"


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:a100:4(S:0-1),nvme:1", {"a100": 4}),
        ("gpu:a100_1g.5gb:14,gpu:a100:2", {"a100_1g.5gb": 14, "a100": 2}),
        ("gpu:tesla:no_consume:4", {"tesla": 4}),
        ("shard:8,gpu:2", {"": 2}),
        ("gpu:3090:4", {"3090": 4}),
    ],
)
def test_gpus_of_gres(gres: str, gpus: dict[str, int]) -> None:
    (group,) = slurm_inventory.parse_nodes(f"p|1|8|1:8:1|1000|{gres}|x|n1\n")
    assert group.gpus == gpus


# -- Nodes --


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
def test_what_the_nodes_have_is_not_rejected(changes: dict[str, Any]) -> None:
    assert node_limits.problems(job(**changes), CLUSTER, INVENTORY) == []


LACKING: list[tuple[dict[str, Any], str, str]] = [
    (
        {"partition": "old", "nodes": 3, "request": None, "memory_gb": 30, "cores_per_task": 2},
        "trainer.num_nodes",
        "trainer.num_nodes=2",
    ),
    ({"cores_per_task": 8}, "cluster.cores_per_gpu", "cluster.cores_per_gpu=4"),
    ({"tasks_per_node": 17, "cores_per_task": 1}, "trainer.devices", "trainer.devices=16"),
    ({"memory_gb": 200}, "cluster.memory_gb", "cluster.memory_gb=125"),
    ({"request": "--gres=gpu:h100:4"}, "cluster.request", "--gres=gpu:a100:4"),
    ({"gpus_per_node": 16, "request": "--gpus-per-node=16"}, "trainer.devices", "trainer.devices=8"),
    ({"partition": "cpu", "request": "--gres=gpu:4"}, "cluster.request", "another cluster.partition="),
    ({"constraint": "h100"}, "cluster.constraint", "cluster.constraint=null"),
    ({"constraint": "large", "nodes": 4}, "trainer.num_nodes", "trainer.num_nodes=2"),
    ({"constraint": "large", "nodes": 4, "memory_gb": 100}, "trainer.num_nodes", "trainer.num_nodes=2"),
]


@pytest.mark.parametrize(("changes", "key", "fix"), LACKING)
def test_what_no_node_has_is_told_by_its_key(changes: dict[str, Any], key: str, fix: str) -> None:
    (problem,) = node_limits.problems(job(**changes), CLUSTER, INVENTORY)
    assert problem.key == key and fix in str(problem)


# -- Partitions, accounts and QoS --


def with_qos(**limits_of_debug: Any) -> Inventory:
    """Return the inventory with the QoS debug, whose flags or limits are these."""
    flags = frozenset(limits_of_debug.pop("flags", ()))
    debug = QoS("debug", Limits(limits_of_debug.pop("max_seconds", None), limits_of_debug), flags)
    return replace(INVENTORY, qos={**INVENTORY.qos, "debug": debug, "part": QoS("part", Limits(3600))})


@pytest.mark.parametrize(
    ("changes", "inventory"),
    [
        ({}, INVENTORY),
        ({"partition": "hidden"}, INVENTORY),  # of which Slurm tells this user nothing
        ({"partition": "gpu,cpu", "walltime_seconds": 10**6}, INVENTORY),  # it may go to cpu
        ({"walltime_seconds": 50000}, INVENTORY),  # with the account science
        ({"qos": "debug", "walltime_seconds": 10**6}, with_qos(flags=["PartitionTimeLimit"])),
        ({"qos": "debug", "nodes": 8}, with_qos(flags=["PartitionMaxNodes"])),
        ({"qos": "debug", "walltime_seconds": 7200}, replace(with_qos(max_seconds=60), rules=Rules())),
        ({"qos": "debug", "partition": "old"}, with_qos(max_seconds=60)),  # the partition's own QoS comes first
        ({"walltime_seconds": 10**6}, Inventory()),  # nothing is known
        # Of an account that may be used, those below it may be used, too; Slurm reads names in lower case.
        ({"partition": "old", "account": "science_part", "qos": "Normal"}, INVENTORY),
        ({"qos": "long", "walltime_seconds": 10**6}, INVENTORY),  # a QoS of which nothing is known may lift limits
        ({"nodes": 5}, replace(INVENTORY, rules=Rules(checks_partitions=True))),  # Slurm itself would have said so
        ({"nodes": 5}, replace(INVENTORY, rules=slurm_inventory.UNKNOWN_RULES)),
        # A plugin may give the job another QoS and account.
        ({"qos": "debug", "partition": "old"}, replace(with_qos(max_seconds=60), rules=Rules(rewrites_jobs=True))),
        ({"partition": "old", "qos": "long", "account": "third"}, replace(INVENTORY, rules=Rules(rewrites_jobs=True))),
        ({"walltime_seconds": 86401}, replace(with_qos(flags=["PartitionTimeLimit"]), rules=Rules(rewrites_jobs=True))),
    ],
)
def test_what_may_start_is_not_rejected(changes: dict[str, Any], inventory: Inventory) -> None:
    assert limits.problems(job(**changes), inventory, is_accepted=True) == []


EXCEEDED: list[tuple[dict[str, Any], Inventory, str, str]] = [
    ({"walltime_seconds": 86401}, INVENTORY, "cluster.time", "cluster.time=24:00:00"),
    ({"nodes": 5}, INVENTORY, "trainer.num_nodes", "trainer.num_nodes=4"),
    ({"nodes": 5}, replace(with_qos(), rules=Rules(rewrites_jobs=True)), "trainer.num_nodes", "trainer.num_nodes=4"),
    ({"nodes": 1, "partition": "old"}, INVENTORY, "trainer.num_nodes", "trainer.num_nodes=2"),
    ({"account": "Other", "walltime_seconds": 43201}, INVENTORY, "cluster.time", "with account other"),
    ({"partition": "old", "qos": "long", "account": "science"}, INVENTORY, "cluster.qos", "debug, normal"),
    ({"qos": "debug"}, with_qos(max_seconds=60), "cluster.time", "with qos debug"),
    ({"qos": "debug"}, with_qos(node=1), "trainer.num_nodes", "with qos debug"),
    ({"qos": "debug"}, with_qos(**{"gres/gpu": 7}), "trainer.num_nodes x trainer.devices", "at most 7"),
    ({"qos": "debug"}, with_qos(cpu=31), "the number of devices x cluster.cores_per_gpu", "got 32"),
    ({"qos": "debug", "partition": "old", "walltime_seconds": 3700}, with_qos(), "cluster.time", "with qos part"),
    (
        {"qos": "debug", "partition": "old"},
        with_qos(max_seconds=60, flags=["OverPartQOS"]),
        "cluster.time",
        "with qos debug",
    ),
]


@pytest.mark.parametrize(("changes", "inventory", "key", "text"), EXCEEDED)
def test_what_would_wait_for_ever_is_told_by_its_key(
    changes: dict[str, Any], inventory: Inventory, key: str, text: str
) -> None:
    (problem,) = limits.problems(job(**changes), inventory, is_accepted=True)
    assert problem.key == key and text in str(problem)


def test_all_of_them_are_told_at_once() -> None:
    keys = [
        problem.key for problem in limits.problems(job(nodes=9, walltime_seconds=10**6), INVENTORY, is_accepted=True)
    ]
    assert keys == ["cluster.time", "trainer.num_nodes"]
    assert len(node_limits.problems(job(memory_gb=500, cores_per_task=9), CLUSTER, INVENTORY)) == 2
