"""All that is known of one run: its directory, read once, and what the scheduler has counted. Imports no torch."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from .. import logs
from ..running import history
from ..running.history import Attempt, Run
from . import accounts, events, report, usage
from .accounts import Account
from .endings import Ending, endings
from .events import Curves
from .figures import CLOCK, Numbers, Span, numbers
from .report import Row
from .usage import Node, Phase


@dataclass(frozen=True)
class Measured:
    """All that a page shows."""

    run: Run
    row: Row
    config: dict[str, Any]
    config_text: str
    made_by: dict[str, Any]
    spans: list[Span]
    endings: list[Ending]
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
    spans = attempts(run, phases, row.state in report.ACTIVE - {"running?"})
    config_text, config = _config(run.path)
    found, why = accounts.ask(report.scheduler(run), [attempt.job for attempt in run.attempts if attempt.job])
    return Measured(
        run=run,
        row=row,
        config=config,
        config_text=config_text,
        made_by=_json(run.path / "made_by.json"),
        spans=spans,
        endings=endings(run, row, phases),
        curves=curves,
        nodes=nodes,
        phases=phases,
        joules=sum(node.energy() for node in nodes) if any(node.gpus("watts") for node in nodes) else None,
        accounts=found,
        no_accounts=why,
        numbers=replace(numbers(spans, phases, curves, nodes, config), steps=row.step),
        notes=[*curves.notes, *notes, *_clocks(nodes, spans), *_silent(run, nodes)],
    )


def attempts(run: Run, phases: Sequence[Phase], active: bool) -> list[Span]:
    """When each attempt began and ended. One that left no end lasted until its last sign of life before the next.

    Args:
        active: the scheduler says that the last one still runs.
    """
    begins = [_begin(attempt, phases) for attempt in run.attempts]
    spans: list[Span] = []
    for index, (attempt, begin) in enumerate(zip(run.attempts, begins, strict=True)):
        limit = begins[index + 1] if index + 1 < len(begins) else math.inf
        if attempt.end:
            end = attempt.end["time"]
        else:
            end = time.time() if active and limit == math.inf else history.last_sign(run, attempt, limit)
        spans.append(Span(begin, max(min(end, limit), begin), attempt.end is not None))
    return spans


def _begin(attempt: Attempt, phases: Sequence[Phase]) -> float:
    """Rank 0 notes an attempt when it has found its checkpoint; the process has begun before."""
    starts = [phase.begin for phase in phases if phase.attempt == attempt.number and phase.what == "start"]
    return min([attempt.start, *(start for start in starts if attempt.start - start < 3600)])


def _clocks(nodes: Sequence[Node], spans: Sequence[Span]) -> list[str]:
    """Nodes whose samples lie outside the run."""
    if not spans:
        return []
    begin, end, notes = spans[0].begin, max(span.end for span in spans), []
    for node in nodes:
        off = [when for when in node.times if not begin - CLOCK <= when <= end + CLOCK]
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
    known = {file.stem.split(".")[0] for file in (run.path / "monitor").glob("*.csv")}
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
    try:
        found = json.loads(logs.text(path))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
