"""Ask PBS for its queues and nodes. Parsing is pure.

DSV is asked for, in which a value is never wrapped, and which all releases of OpenPBS print in the same way.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from hpc.jobs.inventory import Inventory, NodeGroup, Partition, parse_seconds
from hpc.jobs.job_states import parse_dsv, run_command

QUEUES = ("qstat", "-Q", "-f", "-F", "dsv")
SERVER = ("qstat", "-B", "-f", "-F", "dsv")
NODES = ("pbsnodes", "-a", "-v", "-F", "dsv")
AVAILABLE, CHUNK = "resources_available.", "default_chunk."
NOT_FEATURES = {"ncpus", "ngpus", "mem", "host", "vnode", "arch"}
# Values that PBS compares as numbers, sizes or booleans. Only words are compared here.
NO_WORD = re.compile(r"(?i)true|false|[\d.]+[kmgtp]?[bw]?|@.*")
MIB_OF_UNIT = {"b": 2**-20, "kb": 2**-10, "mb": 1, "gb": 2**10, "tb": 2**20}


def query() -> Inventory:
    """Return what PBS reports. Each command is asked once."""
    answers = {command: run_command(*command) for command in (QUEUES, SERVER, NODES)}
    texts = {command: "" if done is None or done.returncode else done.stdout for command, done in answers.items()}
    unanswered = tuple(sorted({command[0] for command, text in texts.items() if not text}))
    try:
        return parse(texts[QUEUES], texts[SERVER], texts[NODES], unanswered=unanswered)
    except ValueError:
        return Inventory(partition_word="queue", unanswered=("pbsnodes", "qstat"))


def parse(queues: str, server: str, nodes: str, *, unanswered: Sequence[str] = ()) -> Inventory:
    """Return the inventory in the output of the three commands. Raise `ValueError` if a number is none."""
    default = next((fields.get("default_queue") for fields in parse_dsv(server, "Server: ").values()), None)
    queue_fields, node_fields = parse_dsv(queues, "Queue: "), parse_dsv(nodes, "Name=")
    executing = {name for name, fields in queue_fields.items() if fields.get("queue_type") != "Route"}
    partitions, groups = [], []
    for name, fields in queue_fields.items():
        destinations = fields.get("route_destinations", "").split(",")
        passes_on = name not in executing
        if passes_on and not executing.issuperset(destinations):  # to another server: nothing of it is known here
            partitions.append(Partition(name, is_default=name == default))
            continue
        own = [] if passes_on else [node for node in node_fields.values() if _runs_jobs_of(node, name, fields)]
        groups += _node_groups(name, own)
        partitions.append(_partition(name, fields, own, is_default=name == default))
    return Inventory(tuple(partitions), tuple(groups), partition_word="queue", unanswered=tuple(unanswered))


def _partition(
    name: str, fields: Mapping[str, str], nodes: Sequence[Mapping[str, str]], *, is_default: bool
) -> Partition:
    least, most = fields.get("resources_min.nodect"), fields.get("resources_max.nodect")
    closed = {"from_route_only", "acl_user_enable", "acl_group_enable"}
    return Partition(
        name,
        is_default=is_default,
        is_up=fields.get("started") == "True",
        is_open=fields.get("enabled") == "True" and not any(fields.get(key) == "True" for key in closed),
        max_seconds=parse_seconds(fields.get("resources_max.walltime", "")),
        min_nodes=int(least or 1),
        max_nodes=int(most) if most else None,
        is_exclusive=bool(nodes) and all("_excl" in node.get("sharing", "") for node in nodes),
        destinations=tuple(filter(None, fields.get("route_destinations", "").split(","))),
    )


def _runs_jobs_of(node: Mapping[str, str], queue: str, fields: Mapping[str, str]) -> bool:
    """Return whether a node is the queue's own, or is bound to none and has the words that the queue's jobs require."""
    if fields.get("hasnodes") == "True" or "queue" in node:
        return node.get("queue") == queue
    added = {key.removeprefix(CHUNK): value for key, value in fields.items() if key.startswith(CHUNK)}
    required = {f"{name}={value}" for name, value in added.items()}
    return {word for word in required if _is_feature(word)} <= _features(node)


def _features(node: Mapping[str, str]) -> frozenset[str]:
    """Return the words of a node's resources that a job can require, as "resource=value"."""
    available = {key.removeprefix(AVAILABLE): value for key, value in node.items() if key.startswith(AVAILABLE)}
    words = {f"{key}={word}" for key, text in available.items() for word in text.split(",")}
    return frozenset(filter(_is_feature, words))


def _is_feature(word: str) -> bool:
    name, _, value = word.partition("=")
    return name not in NOT_FEATURES and not NO_WORD.fullmatch(value)


def _node_groups(queue: str, nodes: Sequence[Mapping[str, str]]) -> Iterator[NodeGroup]:
    """Yield groups of equal hosts. A host may consist of several of PBS's nodes, and one without CPUs was never up."""
    hosts: dict[str, list[Mapping[str, str]]] = {}
    for node in nodes:
        hosts.setdefault(node.get(AVAILABLE + "host", ""), []).append(node)
    equal: dict[tuple[int, int, int, frozenset[str]], list[str]] = {}
    for host, parts in hosts.items():
        cpus, gpus = (sum(int(node.get(AVAILABLE + name, 0)) for node in parts) for name in ("ncpus", "ngpus"))
        memory_mb = sum(parse_mib(node.get(AVAILABLE + "mem", "0")) for node in parts)
        features = frozenset().union(*(_features(node) for node in parts))
        if cpus:
            equal.setdefault((cpus, memory_mb, gpus, features), []).append(host)
    for (cpus, memory_mb, gpus, features), names in equal.items():
        yield NodeGroup(queue, len(names), cpus, memory_mb, {"": gpus}, features, example=names[0])


def parse_mib(text: str) -> int:
    """Return the MiB of a size as PBS prints it: 64gb, 527942380kb."""
    match = re.fullmatch(r"(\d+)([a-z]*)", text.lower())
    return int(int(match[1]) * MIB_OF_UNIT.get(match[2], 0)) if match else 0
