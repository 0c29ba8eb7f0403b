"""What a run directory lacks, or holds damaged: each said in a few words, so that nobody takes a gap for a result."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpc.monitor import node_usage
from hpc.monitor.node_usage import Node, Phase
from hpc.report.numbers import CLOCK, Span, value
from hpc.run import history, job_logs
from hpc.run.history import Run
from hpc.system.files import parse_json

EVERY = 10  # seconds between two samples, where the config does not tell


def of_times(run: Run) -> list[str]:
    """Of the files without which nobody knows how the time was spent."""
    notes = []
    if lines := history.damaged(run.path):
        notes.append(f"attempts.jsonl: {_lines(lines)}")
    elif not run.attempts and run.verdict:
        notes.append("attempts.jsonl tells of no attempt, and there is a verdict")
    if lines := node_usage.damaged_phases(run.path):
        notes.append(f"monitor/phases.jsonl: {_lines(lines)}")
    return notes


def config(run_dir: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Text and content of config.yaml; no content where it is damaged. A half of it may be YAML as well."""
    text = job_logs.text(run_dir / "config.yaml")
    try:
        found = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if text.endswith("\n") else None
    except (yaml.YAMLError, ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return text, found, []
    return text, {}, ["config.yaml is damaged"] if (run_dir / "config.yaml").exists() else []


def made_by(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    path = run_dir / "made_by.json"
    try:
        found = parse_json(job_logs.text(path))
    except (ValueError, RecursionError):
        found = None
    return (found, []) if isinstance(found, dict) else ({}, ["made_by.json is damaged"] if path.exists() else [])


def clocks(nodes: Sequence[Node], spans: Sequence[Span]) -> list[str]:
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


def silent(
    run: Run, nodes: Sequence[Node], spans: Sequence[Span], phases: Sequence[Phase], config: Mapping[str, Any]
) -> list[str]:
    """Nodes without samples, and why."""
    hosts = {host for attempt in run.attempts for host in attempt.hosts}
    if not nodes and hosts:
        return [f"no node's samples: {_no_monitor(run, spans, phases, config)}"]
    # A scheduler may name a node n1 that calls itself n1.cluster.
    known = {file.stem.split(".")[0] for file in (run.path / "monitor").glob("*.csv")}
    silent = sorted(str(host) for host in hosts if str(host).split(".")[0] not in known)
    return [f"no samples of {', '.join(silent[:8])}{' ...' if silent[8:] else ''}"] if silent else []


def _no_monitor(run: Run, spans: Sequence[Span], phases: Sequence[Phase], config: Mapping[str, Any]) -> str:
    if config and value(config, "callbacks.monitor") is None:
        return "callbacks.monitor is off"
    starts = {phase.attempt: phase.seconds for phase in phases if phase.what == "start"}
    every = value(config, "callbacks.monitor.every_seconds")
    longest = max(span.seconds - starts.get(one.number, 0) for one, span in zip(run.attempts, spans, strict=True))
    if longest < (every if isinstance(every, int | float) else EVERY):
        return "the run ended before the first one"
    return "monitor/ is not there (callbacks.monitor)"


def _lines(count: int) -> str:
    return f"{count} damaged line{'s' if count > 1 else ''} left out"
