"""Ask Slurm for its partitions, nodes, and this user's accounts. Parsing is pure.

The forms that are asked for are the same in all versions: `scontrol --oneliner` prints KEY=VALUE, and the columns of
sinfo and sacctmgr are named. Their JSON has other keys in each version, and 22.05 has none for most of it.
"""

import grp
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from hpc.jobs.inventory import Association, Inventory, Limits, NodeGroup, Partition, QoS, Rules, parse_seconds
from hpc.jobs.job_states import run_command, user_name

# Also what is hidden from this user. sinfo: equal nodes only, as otherwise "8+" stands for 8 and 16 CPUs.
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
NODES = ("sinfo", "--all", "--exact", "--noconvert", "--noheader", "--format=%P|%D|%c|%z|%m|%G|%f|%N")
RULES = ("scontrol", "show", "config")
ASSOCIATIONS = ("sacctmgr", "--noheader", "--parsable2", "show", "associations", "where")
ASSOCIATION_COLUMNS = "format=Cluster,Account,Partition,DefaultQOS,QOS,MaxWall,MaxTRES,GrpTRES"
QOS = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", "format=Name,Flags,MaxWall,MaxTRES,MaxTRESPU,GrpTRES")
GPU_GRES = re.compile(r"\bgpu(?::([^:,()]+))?(?::no_consume)?:(\d+)")  # gpu:4, gpu:a100:4(S:0-1)
# What is not known may be so: then limits that these would lift are not compared.
UNKNOWN_RULES = Rules(checks_partitions=True, rewrites_jobs=True)


def query(*, uid: int) -> Inventory:
    """Return what Slurm reports to this user. Each command is asked once, all at the same time."""
    questions: dict[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
        "partitions": (PARTITIONS, partial(parse_partitions, groups=_group_names())),
        "nodes": (NODES, parse_nodes),
        "rules": (RULES, parse_rules),
        "qos": (QOS, parse_qos),
    }
    if name := user_name(uid):
        questions["associations"] = ((*ASSOCIATIONS, f"user={name}", ASSOCIATION_COLUMNS), parse_associations)
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = dict(zip(questions, pool.map(_ask, questions.values()), strict=True))
    answered: dict[str, Any] = {part: answer for part, answer in answers.items() if answer is not None}
    unanswered = {questions[part][0][0] for part in questions if part not in answered}
    answered.setdefault("rules", UNKNOWN_RULES)
    return leave_out_other_clusters(Inventory(**answered, unanswered=tuple(sorted(unanswered))))


def leave_out_other_clusters(inventory: Inventory) -> Inventory:
    """Return an inventory without this user's accounts on other clusters of the same database."""
    name = inventory.rules.cluster
    return replace(inventory, associations=tuple(item for item in inventory.associations if name in ("", item.cluster)))


def _ask(question: tuple[tuple[str, ...], Callable[[str], Any]]) -> Any:
    """Return the parsed answer; None if the command is missing, fails, or prints something else."""
    command, parse = question
    answer = run_command(*command)
    if answer is None or answer.returncode:
        return None
    try:
        return parse(answer.stdout)
    except (ValueError, KeyError, IndexError):
        return None


def parse_rules(text: str) -> Rules:
    """Return the settings in what scontrol prints of Slurm's configuration."""
    values = dict(re.findall(r"(?m)^(\w+)\s*=\s*(\S+)", text))
    enforced = values.get("AccountingStorageEnforce", "").lower().split(",")
    plugins = [values.get(key, "(null)") for key in ("JobSubmitPlugins", "CliFilterPlugins")]
    return Rules(
        cluster=values.get("ClusterName", ""),
        enforces_limits=bool({"limits", "safe", "all"} & set(enforced)),
        checks_partitions=values.get("EnforcePartLimits", "NO") != "NO",
        rewrites_jobs=any(plugin != "(null)" for plugin in plugins),
    )


def parse_partitions(text: str, *, groups: frozenset[str] = frozenset()) -> tuple[Partition, ...]:
    """Return the partitions in the output of scontrol. Raise `ValueError` or `KeyError` if it is something else.

    Args:
        groups: names of this user's groups.
    """
    return tuple(_partition(read_fields(line), groups) for line in text.splitlines() if line.strip())


def read_fields(line: str) -> dict[str, str]:
    """Return the KEY=VALUE pairs of a line that scontrol prints."""
    pairs = (pair.partition("=") for pair in line.split())
    return {key: value for key, equals, value in pairs if equals}


def _partition(fields: Mapping[str, str], groups: frozenset[str]) -> Partition:
    max_nodes, qos, qos_names = fields["MaxNodes"], fields.get("QoS", "N/A"), fields.get("AllowQos", "ALL")
    return Partition(
        name=fields["PartitionName"],
        is_default=fields["Default"] == "YES",
        is_up=fields["State"] == "UP",
        is_open=_is_open(fields, groups),
        is_preemptible=fields.get("PreemptMode", "OFF") != "OFF",
        max_seconds=parse_seconds(fields["MaxTime"]),
        min_nodes=int(fields["MinNodes"]),
        max_nodes=None if max_nodes == "UNLIMITED" else int(max_nodes),
        is_exclusive=fields["OverSubscribe"] == "EXCLUSIVE",
        qos=None if qos == "N/A" else qos.lower(),
        qos_names=None if qos_names == "ALL" else frozenset(qos_names.lower().split(",")),
    )


def _is_open(fields: Mapping[str, str], groups: frozenset[str]) -> bool:
    """Return whether this user may name a partition: a group may be needed, and hidden ones are not for all."""
    allowed = fields.get("AllowGroups", "ALL")
    is_member = allowed == "ALL" or bool(groups.intersection(allowed.split(",")))
    return is_member and "YES" not in (fields.get("Hidden"), fields.get("RootOnly"))


def _group_names() -> frozenset[str]:
    """Return the names of this user's groups."""
    names = set()
    for gid in {os.getgid(), *os.getgroups()}:
        try:
            names.add(grp.getgrgid(gid).gr_name)
        except KeyError:
            continue
    return frozenset(names)


def parse_nodes(text: str) -> tuple[NodeGroup, ...]:
    """Return the groups in the output of sinfo. Raise `ValueError` if it has other columns."""
    return tuple(_node_group(line) for line in text.splitlines() if line.strip())


def _node_group(line: str) -> NodeGroup:
    name, count, cpus, layout, memory, gres, features, names = (part.strip() for part in line.split("|"))
    gpus: dict[str, int] = {}
    for kind, number in GPU_GRES.findall(gres):
        gpus[kind] = gpus.get(kind, 0) + int(number)
    return NodeGroup(
        partition=name.rstrip("*"),
        num_nodes=int(count),
        cpus=int(cpus),
        memory_mb=int(memory),
        gpus=gpus,
        features=frozenset() if features == "(null)" else frozenset(features.split(",")),
        threads_per_core=int(layout.split(":")[2]),
        example=first_name(names),
    )


def query_node(name: str) -> dict[str, str]:
    """Return the fields of a node; {} if Slurm does not report them."""
    answer = run_command("scontrol", "--oneliner", "show", "node", name)
    return read_fields(answer.stdout) if answer and not answer.returncode else {}


def first_name(names: str) -> str:
    """Return the first node of a list as Slurm writes it: `g[003-010,12],h1` is g003."""
    match = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", names)
    return "".join(part or "" for part in match.groups()) if match else names


def parse_associations(text: str) -> tuple[Association, ...]:
    """Return the accounts of a user in the output of sacctmgr. Raise `ValueError` if it has other columns."""
    associations = []
    for line in text.splitlines():
        cluster, account, partition, default_qos, names, wall, per_job, of_group = line.split("|")
        qos_names = frozenset(filter(None, names.split(",")))
        if not default_qos and (len(qos_names) == 1 or "normal" in qos_names):  # as Slurm chooses it
            default_qos = "normal" if "normal" in qos_names else min(qos_names)
        limits = Limits(parse_seconds(wall), parse_smallest_limits(per_job, of_group))
        associations.append(Association(account, partition or None, default_qos or None, qos_names, limits, cluster))
    return tuple(associations)


def parse_qos(text: str) -> dict[str, QoS]:
    """Return each QoS in the output of sacctmgr. Raise `ValueError` if it has other columns."""
    all_qos = {}
    for line in text.splitlines():
        name, flags, wall, per_job, per_user, of_group = line.split("|")
        limits = Limits(parse_seconds(wall), parse_smallest_limits(per_job, per_user, of_group))
        all_qos[name] = QoS(name, limits, frozenset(flags.split(",")))
    return all_qos


def parse_smallest_limits(*texts: str) -> dict[str, int]:
    """Return the smallest limit of each resource: that of a job, of all jobs of a user, of all jobs of the group.

    A job that exceeds any of them alone waits for ever. Limits with a unit, such as mem=100G, are left out.
    """
    limits: dict[str, int] = {}
    for name, number in re.findall(r"([a-z][\w/:.-]*)=(\d+)(?![\w.])", ",".join(texts)):
        limits[name] = min(int(number), limits.get(name, int(number)))
    return limits
