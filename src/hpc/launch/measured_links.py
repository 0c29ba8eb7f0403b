"""Measured links of a cluster's network, kept for the plan in a small file per cluster. Imports no torch."""

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
    """A link as all-reduce sees it, with all GPUs of the nodes busy at once."""

    gbs: float  # bus bandwidth per GPU at the largest message, GB/s in one direction
    latency: float  # seconds of a call with the smallest message
    ranks: int  # in one call
    nodes: list[str]
    date: str


@dataclass(frozen=True)
class MeasuredLinks:
    """The links of one cluster; None: not measured."""

    within: Link | None  # between the GPUs of a node
    across: Link | None  # between nodes


def load(cluster: str, backend: str = "nccl") -> MeasuredLinks | None:
    """Return what tools/comm.py has last measured on a cluster; None if there is nothing, or it cannot be read."""
    try:
        links = parse(json.loads(file_of(cluster).read_text(encoding="utf-8"))[backend])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return links if links.within or links.across else None


def save(cluster: str, backend: str, *, links: MeasuredLinks) -> Path:
    """Save links beside those of other backends, and return the file. A link that is None now keeps its old value.

    Raises:
        OSError: the file cannot be written from here.
    """
    path = file_of(cluster)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        by_backend = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        by_backend = {}
    old = load(cluster, backend) or MeasuredLinks(None, None)
    merged = MeasuredLinks(links.within or old.within, links.across or old.across)
    write_atomically(path, json.dumps(by_backend | {backend: asdict(merged)}, indent=1))
    return path


def parse(saved: Any) -> MeasuredLinks:
    """Return links from what `asdict` made of them.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is something else.
    """
    return MeasuredLinks(*(_parse_link(saved.get(scope)) for scope in ("within", "across")))


def file_of(cluster: str) -> Path:
    """Return the file of a cluster's links, one for all runs of this project by this user."""
    cache = home.expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return cache / project_name() / "network" / f"{cluster}.json"


def _parse_link(saved: Any) -> Link | None:
    if saved is None:
        return None
    gbs, latency, ranks = float(saved["gbs"]), float(saved["latency"]), int(saved["ranks"])
    if not (math.isfinite(gbs) and gbs > 0 and math.isfinite(latency) and latency > 0 and ranks > 1):
        raise ValueError(f"a link must have positive numbers and several ranks; got {saved}")
    return Link(gbs, latency, ranks, [str(node) for node in saved["nodes"]], str(saved["date"]))
