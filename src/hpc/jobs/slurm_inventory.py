"""Ask Slurm for its partitions, nodes, and this user's accounts. Parsing is pure.

The forms that are asked for are the same in all versions: `scontrol --oneliner` prints KEY=VALUE, and the columns of
sinfo and sacctmgr are named. Their JSON has other keys in each version, and 22.05 has none for most of it.
"""

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hpc.jobs.inventory import Association, Inventory, Limits, NodeGroup, Partition, QoS
from hpc.jobs.job_states import run_command, user_name

# Also what is hidden from this user. sinfo: equal nodes only, as otherwise "8+" stands for 8 and 16 CPUs.
PARTITIONS = ("scontrol", "--all", "--oneliner", "show", "partition")
NODES = ("sinfo", "--all", "--exact", "--noheader", "--format=%P|%D|%c|%z|%m|%G|%f|%N")
ASSOCIATION_COLUMNS = "Account,Partition,DefaultQOS,QOS,MaxWall,MaxTRES,GrpTRES"
QOS_COLUMNS = "Name,Flags,MaxWall,MaxTRES,MaxTRESPU,GrpTRES"
GPU = re.compile(r"\bgpu(?::([^:,()]+))?:(\d+)")  # gpu:4, gpu:a100:4(S:0-1)
NO_LIMIT = ("infinite", "unlimited", "n/a", "none", "")


def query(*, uid: int) -> Inventory:
    """Return what Slurm tells this user. Each command is asked once, all at the same time."""
    table = ("sacctmgr", "--noheader", "--parsable2", "show")
    name = user_name(uid)
    questions: dict[str, tuple[tuple[str, ...], Callable[[str], Any]]] = {
        "partitions": (PARTITIONS, parse_partitions),
        "nodes": (NODES, parse_nodes),
        "rules": (("scontrol", "show", "config"), parse_rules),
        "qos": ((*table, "qos", f"format={QOS_COLUMNS}"), parse_qos),
    }
    if name:
        command = (*table, "associations", "where", f"user={name}", f"format={ASSOCIATION_COLUMNS}")
        questions["associations"] = (command, parse_associations)
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = dict(zip(questions, pool.map(_ask, questions.values()), strict=True))
    unanswered = {questions[part][0][0] for part, answer in answers.items() if answer is None}
    rules = answers.pop("rules") or {}
    known = {part: answer for part, answer in answers.items() if answer is not None}
    return Inventory(**known, **rules, unanswered=tuple(sorted(unanswered)))


def _ask(question: tuple[tuple[str, ...], Callable[[str], Any]]) -> Any:
    """Return the parsed answer; None if the command is missing, fails, or prints something else."""
    command, parse = question
    answer = run_command(*command)
    if answer is None or answer.returncode:
        return None
    try:
        return parse(answer.stdout)
    except (ValueError, KeyError):
        return None


def parse_rules(text: str) -> dict[str, bool]:
    """Return two fields of `Inventory` from what scontrol prints of Slurm's configuration."""
    values = dict(re.findall(r"(?m)^(\w+)\s*=\s*(\S+)", text))
    enforced = values.get("AccountingStorageEnforce", "").lower().split(",")
    return {
        "enforces_limits": bool({"limits", "safe", "all"} & set(enforced)),
        "rewrites_jobs": values.get("JobSubmitPlugins", "(null)") != "(null)",
    }


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """Return the partitions in the output of scontrol. Raise `ValueError` or `KeyError` if it is something else."""
    return tuple(_partition(read_fields(line)) for line in text.splitlines() if line.strip())


def read_fields(line: str) -> dict[str, str]:
    """Return the KEY=VALUE pairs of a line that scontrol prints."""
    pairs = (pair.partition("=") for pair in line.split())
    return {key: value for key, equals, value in pairs if equals}


def _partition(fields: Mapping[str, str]) -> Partition:
    max_nodes, qos = fields["MaxNodes"], fields.get("QoS", "N/A")
    return Partition(
        name=fields["PartitionName"],
        is_default=fields["Default"] == "YES",
        is_up=fields["State"] == "UP",
        max_seconds=parse_seconds(fields["MaxTime"]),
        min_nodes=int(fields["MinNodes"]),
        max_nodes=None if max_nodes.lower() in NO_LIMIT else int(max_nodes),
        is_exclusive=fields["OverSubscribe"] == "EXCLUSIVE",
        qos=None if qos.lower() in NO_LIMIT else qos,
        accounts=_names(fields.get("AllowAccounts", "ALL")),
        qos_names=_names(fields.get("AllowQos", "ALL")),
    )


def _names(text: str) -> frozenset[str] | None:
    return None if text == "ALL" else frozenset(text.split(","))


def parse_nodes(text: str) -> tuple[NodeGroup, ...]:
    """Return the groups in the output of sinfo. Raise `ValueError` if it has other columns."""
    return tuple(_node_group(line) for line in text.splitlines() if line.strip())


def _node_group(line: str) -> NodeGroup:
    name, count, cpus, layout, memory, gres, features, names = (part.strip() for part in line.split("|"))
    gpus: dict[str, int] = {}
    for kind, number in GPU.findall(gres):
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
    """Return the fields of a node; {} if Slurm does not tell them."""
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
        account, partition, default_qos, names, wall, per_job, of_group = line.split("|")
        limits = Limits(parse_seconds(wall), _smallest(per_job, of_group))
        qos_names = frozenset(filter(None, names.split(",")))
        default_qos = default_qos or ("normal" if "normal" in qos_names else "")  # as Slurm takes it
        associations.append(Association(account, partition or None, default_qos or None, qos_names, limits))
    return tuple(associations)


def parse_qos(text: str) -> dict[str, QoS]:
    """Return each QoS in the output of sacctmgr. Raise `ValueError` if it has other columns."""
    found = {}
    for line in text.splitlines():
        name, flags, wall, *resources = line.split("|")
        if len(resources) != 3:
            raise ValueError(line)
        found[name] = QoS(name, Limits(parse_seconds(wall), _smallest(*resources)), frozenset(flags.split(",")))
    return found


def _smallest(*texts: str) -> dict[str, int]:
    """Return the smallest limit of each resource: that of a job, of all jobs of a user, of all jobs of the group.

    A job that exceeds any of them alone waits for ever.
    """
    limits: dict[str, int] = {}
    for name, number in re.findall(r"([a-z][\w/:.-]*)=(\d+)(?![\w.])", ",".join(texts)):
        limits[name] = min(int(number), limits.get(name, int(number)))
    return limits


def parse_seconds(text: str) -> int | None:
    """Return the seconds of a limit as Slurm prints it: D-HH:MM:SS, HH:MM:SS or MM:SS; None: no limit."""
    if text.lower() in NO_LIMIT:
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = [0] * (3 - len(parts)) + parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
