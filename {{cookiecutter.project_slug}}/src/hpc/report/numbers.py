"""A run in numbers: how its time was spent, what its steps consist of, what its devices did. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc.jobs import hardware
from hpc.monitor import node_usage
from hpc.monitor.event_files import Curves
from hpc.monitor.node_usage import Node, Phase

WALL = {"start": "start-up", "validation": "validation", "checkpoint": "checkpoints", "test": "test"}
CLOCK = 60  # seconds that a node's clock may be wrong
PARTS = ("compute", "data", "other")  # of a step


@dataclass(frozen=True)
class Span:
    """An attempt in unix time; `sure`: it has noted its end."""

    begin: float
    end: float
    sure: bool

    @property
    def seconds(self) -> float:
        return max(self.end - self.begin, 0.0)


@dataclass(frozen=True)
class Numbers:
    """What findings are made of. Shares are of 1; None: not known."""

    wall: dict[str, float]  # seconds by what the run did
    times: dict[str, int]  # how often it started, validated, saved
    step: dict[str, float]  # mean seconds: step, and its compute, data and other
    mfu: float | None
    communication: float | None  # share of a step in which devices do nothing else
    gpu_percent: float | None  # mean while training
    gpu_memory_gb: float | None  # the most of any GPU at any time
    gpu_room_gb: float | None  # that such a GPU has
    cpu_percent: float | None
    steps: int | None = None  # of an epoch, or that were made, if less

    def share(self, part: str) -> float:
        """Of the run's time, or of a step's; 0 where it is not known."""
        if part in PARTS:
            return self.step.get(part, 0.0) / self.step["step"] if self.step.get("step") else 0.0
        total = sum(self.wall.values())
        return self.wall.get(part, 0.0) / total if total else 0.0


def numbers(
    spans: Sequence[Span],
    phases: Sequence[Phase],
    curves: Curves,
    nodes: Sequence[Node],
    config: Mapping[str, Any],
) -> Numbers:
    total = sum(span.seconds for span in spans)
    wall = {name: sum(phase.seconds for phase in phases if phase.what == what) for what, name in WALL.items()}
    wall = {name: seconds for name, seconds in wall.items() if seconds}
    if wall:
        wall["training"] = max(total - sum(wall.values()), 0.0)
    step = {part: curves.mean(f"perf/{part}_seconds") for part in ("step", *PARTS)}
    kept = {node.host: node_usage.training(node, phases) for node in nodes}
    used = [(node.host, node.gpu_percent()) for node in nodes if node.gpus("percent")]
    percents = [values[index] for host, values in used for index in kept[host]]
    cpu = [
        node.columns["cpu_percent"][index]
        for node in nodes
        for index in kept[node.host]
        if "cpu_percent" in node.columns
    ]
    memory = [value for node in nodes for column in node.gpus("memory_gb") for value in column if value == value]
    shared = re.search(r"communication (\d+)%", curves.profile)
    return Numbers(
        wall=wall,
        times={name: sum(phase.what == what for phase in phases) for what, name in WALL.items()},
        step={part: seconds for part, seconds in step.items() if seconds is not None and seconds >= 0},
        mfu=curves.rate("perf/mfu"),
        communication=int(shared[1]) / 100 if shared else None,
        gpu_percent=_known(node_usage.mean(percents)),
        gpu_memory_gb=max(memory, default=None),
        gpu_room_gb=_room(config),
        cpu_percent=_known(node_usage.mean(cpu)),
    )


def value(config: Any, key: str) -> Any:
    """Of a dotted key; None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _room(config: Mapping[str, Any]) -> float | None:
    name = value(config, "cluster.gpu")
    found = hardware.find(name) if isinstance(name, str) else None
    return found.memory_gb if found else None


def _known(number: float) -> float | None:
    return number if number == number else None
