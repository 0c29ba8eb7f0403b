"""What was measured of a cluster's network, kept for the plan in a small file per cluster. Imports no torch."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc.config.project import project_name
from hpc.system import home
from hpc.system.files import write_atomically


@dataclass(frozen=True)
class Link:
    """What all-reduce made of a link, with all GPUs of the nodes busy at once."""

    gbs: float  # bus bandwidth per GPU at the largest message, GB/s in one direction
    latency: float  # seconds of a call with the smallest message
    ranks: int  # that took part in one call
    nodes: list[str]
    date: str


@dataclass(frozen=True)
class MeasuredLinks:
    """Of one cluster; None: not measured there."""

    within: Link | None  # between the GPUs of a node
    across: Link | None  # between nodes


def load(cluster: str, backend: str = "nccl") -> MeasuredLinks | None:
    """What tools/comm.py has last measured on this cluster; None: nothing, or it cannot be read."""
    try:
        found = parse(json.loads(file_of(cluster).read_text(encoding="utf-8"))[backend])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if found.within or found.across else None


def save(cluster: str, backend: str, new: MeasuredLinks) -> Path:
    """Note it beside what is known of other backends; what was not measured now stays as it was.

    Raises:
        OSError: the file cannot be written from here.
    """
    path = file_of(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    old = load(cluster, backend) or MeasuredLinks(None, None)
    both = MeasuredLinks(new.within or old.within, new.across or old.across)
    write_atomically(path, json.dumps(known | {backend: asdict(both)}, indent=1))
    return path


def parse(noted: Any) -> MeasuredLinks:
    """What `asdict` made of it.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is something else.
    """
    return MeasuredLinks(*(_parse_link(noted.get(scope)) for scope in ("within", "across")))


def file_of(cluster: str) -> Path:
    """Where it is kept, for all runs of this project by this user."""
    cache = home.expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return cache / project_name() / "network" / f"{cluster}.json"


def _parse_link(noted: Any) -> Link | None:
    if noted is None:
        return None
    gbs, latency, ranks = float(noted["gbs"]), float(noted["latency"]), int(noted["ranks"])
    if not (math.isfinite(gbs) and gbs > 0 and math.isfinite(latency) and latency > 0 and ranks > 1):
        raise ValueError(f"no link: {noted}")
    return Link(gbs, latency, ranks, [str(node) for node in noted["nodes"]], str(noted["date"]))
