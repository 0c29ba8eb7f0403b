"""Ask PBS for its queues and nodes. Parsing is pure.

DSV is asked for, in which a value is never wrapped, and which all releases of OpenPBS print in the same way.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from hpc.jobs.inventory import Inventory, NodeGroup, Partition
from hpc.jobs.job_states import parse_dsv, run_command

QUEUES = ("qstat", "-Q", "-f", "-F", "dsv")
SERVER = ("qstat", "-B", "-f", "-F", "dsv")
NODES = ("pbsnodes", "-a", "-v", "-F", "dsv")
AVAILABLE, CHUNK = "resources_available.", "default_chunk."
COUNTED = {"ncpus", "ngpus", "mem", "host", "vnode", "arch"}  # resources of a node that are no features
MIB_OF_UNIT = {"b": 2**-20, "kb": 2**-10, "mb": 1, "gb": 2**10, "tb": 2**20}


def query() -> Inventory:
    """Return what PBS tells. Each command is asked once."""
    answers = {command: run_command(*command) for command in (QUEUES, SERVER, NODES)}
    texts = {command: "" if done is None or done.returncode else done.stdout for command, done in answers.items()}
    unanswered = sorted({command[0] for command, text in texts.items() if not text})
    return parse(texts[QUEUES], texts[SERVER], texts[NODES], unanswered=unanswered)


def parse(queues: str, server: str, nodes: str, *, unanswered: Sequence[str] = ()) -> Inventory:
    """Return the inventory in the output of the three commands."""
    default = next((fields.get("default_queue") for fields in parse_dsv(server, "Server: ").values()), None)
    queue_fields, node_fields = parse_dsv(queues, "Queue: "), parse_dsv(nodes, "Name=")
    partitions, groups = [], []
    for name, fields in queue_fields.items():
        own = [node for node in node_fields.values() if _runs_jobs_of(node, name, fields)]
        partitions.append(_partition(name, fields, own, is_default=name == default))
        groups += _node_groups(name, own)
    return Inventory(tuple(partitions), tuple(groups), partition_word="queue", unanswered=tuple(unanswered))


def _partition(
    name: str, fields: Mapping[str, str], nodes: Sequence[Mapping[str, str]], *, is_default: bool
) -> Partition:
    least, most = fields.get("resources_min.nodect"), fields.get("resources_max.nodect")
    destinations = [word.partition("@")[0] for word in fields.get("route_destinations", "").split(",")]
    return Partition(
        name,
        is_default=is_default,
        is_up=fields.get("started") == "True",
        max_seconds=parse_seconds(fields.get("resources_max.walltime", "")),
        min_nodes=int(least or 1),
        max_nodes=int(most) if most else None,
        is_exclusive=bool(nodes) and all(node.get("sharing", "").startswith("force_excl") for node in nodes),
        destinations=tuple(filter(None, destinations)),
        is_direct=fields.get("from_route_only") != "True",
    )


def _runs_jobs_of(node: Mapping[str, str], queue: str, fields: Mapping[str, str]) -> bool:
    """Return whether a node is the queue's own, or is bound to none and has what the queue adds to each request."""
    if fields.get("hasnodes") == "True" or "queue" in node:
        return node.get("queue") == queue
    added = {key.removeprefix(CHUNK): value for key, value in fields.items() if key.startswith(CHUNK)}
    return all(
        value in node.get(AVAILABLE + name, "").split(",") for name, value in added.items() if name not in COUNTED
    )


def _node_groups(queue: str, nodes: Sequence[Mapping[str, str]]) -> Iterator[NodeGroup]:
    """Yield groups of equal hosts. A host may consist of several of PBS's nodes."""
    hosts: dict[str, NodeGroup] = {}
    for fields in nodes:
        available = {key.removeprefix(AVAILABLE): value for key, value in fields.items() if key.startswith(AVAILABLE)}
        name, gpus = available.get("host", ""), int(available.get("ngpus", 0))
        features = {f"{key}={word}" for key, text in available.items() for word in text.split(",")}
        before = hosts.get(name)
        hosts[name] = NodeGroup(
            queue,
            num_nodes=1,
            cpus=int(available.get("ncpus", 0)) + (before.cpus if before else 0),
            memory_mb=parse_mib(available.get("mem", "0")) + (before.memory_mb if before else 0),
            gpus={"": gpus + (before.gpus[""] if before else 0)},
            features=frozenset(feature for feature in features if feature.partition("=")[0] not in COUNTED),
        )
    known = {name: host for name, host in hosts.items() if host.cpus}  # others have never been up
    for names in groupby(sorted(known, key=lambda name: repr(known[name])), key=lambda name: repr(known[name])):
        equal = list(names[1])
        yield replace(known[equal[0]], num_nodes=len(equal), example=equal[0])


def parse_mib(text: str) -> int:
    """Return the MiB of a size as PBS prints it: 64gb, 527942380kb."""
    match = re.fullmatch(r"(\d+)([a-z]*)", text.lower())
    return int(int(match[1]) * MIB_OF_UNIT.get(match[2], 0)) if match else 0


def parse_seconds(text: str) -> int | None:
    """Return the seconds of HH:MM:SS; None: no limit."""
    if not text:
        return None
    hours, minutes, seconds = ([0, 0] + [int(part) for part in text.split(":")])[-3:]
    return (hours * 60 + minutes) * 60 + seconds
