"""A run directory as numbers: how its time was spent, what its steps consist of, what its devices did. No torch."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from . import accounts, events, hardware, history, logs, report, usage
from .accounts import Account
from .events import Curves
from .history import Run
from .report import Row
from .usage import Node, Phase

WALL = {"start": "start-up", "validation": "validation", "checkpoint": "checkpoints", "test": "test"}
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

    def share(self, part: str) -> float:
        """Of the run's time, or of a step's; 0 where it is not known."""
        if part in PARTS:
            return self.step.get(part, 0.0) / self.step["step"] if self.step.get("step") else 0.0
        total = sum(self.wall.values())
        return self.wall.get(part, 0.0) / total if total else 0.0


@dataclass(frozen=True)
class Measured:
    """All that a page shows."""

    run: Run
    row: Row
    config: dict[str, Any]
    config_text: str
    made_by: dict[str, Any]
    spans: list[Span]
    curves: Curves
    nodes: list[Node]
    phases: list[Phase]
    joules: float | None
    accounts: list[Account]
    no_accounts: str  # why there are none
    numbers: Numbers
    notes: list[str]  # what is damaged or missing


def measure(run: Run) -> Measured:
    """Read all of a run directory; what cannot be read is missing, and said so."""
    row = report.one(run)
    curves, phases = events.read(run.path / "tensorboard"), usage.phases(run.path)
    nodes, notes = usage.nodes(run.path)
    spans = attempts(run, phases, nodes, row.state in report.ACTIVE)
    config_text, config = _config(run.path)
    found, why = accounts.ask(report.scheduler(run), [attempt.job for attempt in run.attempts if attempt.job])
    return Measured(
        run=run,
        row=row,
        config=config,
        config_text=config_text,
        made_by=_json(run.path / "made_by.json"),
        spans=spans,
        curves=curves,
        nodes=nodes,
        phases=phases,
        joules=sum(node.energy() for node in nodes) if any(node.gpus("watts") for node in nodes) else None,
        accounts=found,
        no_accounts=why,
        numbers=numbers(spans, phases, curves, nodes, config),
        notes=[*curves.notes, *notes, *_clocks(nodes, spans), *_silent(run, nodes)],
    )


def attempts(run: Run, phases: Sequence[Phase], nodes: Sequence[Node], active: bool) -> list[Span]:
    """When each attempt began and ended. One that left no end lasted until the last sign of life before the next."""
    signs = history.changes(run) + [phase.end for phase in phases]
    spans = []
    for attempt, following in zip_longest(run.attempts, run.attempts[1:]):
        # rank 0 notes an attempt when it has found its checkpoint; the process has begun before
        starts = [phase.begin for phase in phases if phase.attempt == attempt.number and phase.what == "start"]
        begin = min([attempt.start, *(start for start in starts if attempt.start - start < 3600)])
        if attempt.end:
            end = attempt.end["time"]
        elif following is None and active:
            end = time.time()
        else:
            limit = following.start if following else time.time()
            end = max((sign for sign in signs if begin <= sign <= limit), default=begin)
        spans.append(Span(begin, max(end, begin), attempt.end is not None))
    return spans


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
    kept = {node.host: usage.training(node, phases) for node in nodes}
    percents = [node.gpu_percent()[index] for node in nodes if node.gpus("percent") for index in kept[node.host]]
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
        mfu=curves.mean("perf/mfu"),
        communication=int(shared[1]) / 100 if shared else None,
        gpu_percent=_known(usage.mean(percents)),
        gpu_memory_gb=max(memory, default=None),
        gpu_room_gb=_room(config),
        cpu_percent=_known(usage.mean(cpu)),
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


def _clocks(nodes: Sequence[Node], spans: Sequence[Span]) -> list[str]:
    """Nodes whose samples lie outside the run."""
    if not spans:
        return []
    notes = []
    for node in nodes:
        off = [when for when in node.times if not spans[0].begin - 60 <= when <= max(span.end for span in spans) + 60]
        if off:
            notes.append(
                f"{len(off)} of {len(node.times)} samples of {node.host} lie outside the run: its clock is wrong"
            )
    return notes


def _silent(run: Run, nodes: Sequence[Node]) -> list[str]:
    hosts = {host for attempt in run.attempts for host in attempt.hosts}
    if not nodes:
        return ["no node's samples: monitor/ is not there (callbacks.monitor)"] if hosts else []
    # A scheduler may name a node n1 that calls itself n1.cluster.
    known = {node.host.split(".")[0] for node in nodes}
    silent = sorted(str(host) for host in hosts if str(host).split(".")[0] not in known)
    return [f"no samples of {', '.join(silent[:8])}{' ...' if silent[8:] else ''}"] if silent else []


def _config(run_dir: Path) -> tuple[str, dict[str, Any]]:
    text = logs.text(run_dir / "config.yaml")
    try:
        found = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError):
        found = None
    return text, found if isinstance(found, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    import json

    try:
        found = json.loads(logs.text(path))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
