"""Notes on files of a run directory that are missing or damaged, so that nobody takes a gap for a result."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpc.monitor import node_usage
from hpc.monitor.damage_notes import damage_note
from hpc.monitor.node_usage import NodeSamples, Phase
from hpc.report.run_statistics import CLOCK_TOLERANCE_SECONDS, AttemptSpan, config_value
from hpc.run import history, job_logs
from hpc.run.history import RunRecord
from hpc.system.files import parse_json

DEFAULT_EVERY_SECONDS = 10  # between two samples, if the config does not say


def time_damage_notes(run: RunRecord) -> list[str]:
    """Return notes on damage after which it is unknown how the time was spent."""
    notes = []
    if num_lines := history.num_damaged_lines(run.path):
        notes.append(damage_note("attempts.jsonl", num_lines, "line"))
    elif not run.attempts and run.verdict:
        notes.append("attempts.jsonl records no attempt, although there is a verdict")
    if num_lines := node_usage.count_damaged_phases(run.path):
        notes.append(damage_note("monitor/phases.jsonl", num_lines, "line"))
    return notes


def read_config(run_dir: Path) -> tuple[str, dict[str, Any], list[str]]:
    """Return text, content and notes of config.yaml. The content of a damaged file is empty.

    A file without its last newline counts as damaged, because half of a YAML file may be valid, too.
    """
    text = job_logs.read_tail(run_dir / "config.yaml")
    try:
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if text.endswith("\n") else None
    except (yaml.YAMLError, ValueError, RecursionError):
        content = None
    if isinstance(content, dict):
        return text, content, []
    return text, {}, ["config.yaml is damaged"] if (run_dir / "config.yaml").exists() else []


def read_made_by(run_dir: Path) -> tuple[dict[str, Any], list[str]]:
    """Return content and notes of made_by.json."""
    path = run_dir / "made_by.json"
    try:
        content = parse_json(job_logs.read_tail(path))
    except (ValueError, RecursionError):
        content = None
    return (content, []) if isinstance(content, dict) else ({}, ["made_by.json is damaged"] if path.exists() else [])


def notes_on_clocks(nodes: Sequence[NodeSamples], spans: Sequence[AttemptSpan]) -> list[str]:
    """Return a note for each node whose samples lie outside the run."""
    if not spans:
        return []
    earliest = spans[0].begin - CLOCK_TOLERANCE_SECONDS
    latest = max(span.end for span in spans) + CLOCK_TOLERANCE_SECONDS
    notes = []
    for node in nodes:
        if num_outside := sum(not earliest <= time <= latest for time in node.times):
            samples = f"{num_outside} of {len(node.times)} samples of {node.host}"
            notes.append(f"{samples} lie outside the run, so the clock of this node is wrong")
    return notes


def notes_on_samples(
    run: RunRecord,
    nodes: Sequence[NodeSamples],
    *,
    spans: Sequence[AttemptSpan],
    phases: Sequence[Phase],
    config: Mapping[str, Any],
) -> list[str]:
    """Return a note if nodes of the run have no samples."""
    hosts = {host for attempt in run.attempts for host in attempt.hosts}
    if not nodes and hosts:
        return [f"there are no samples of any node: {_reason_for_no_samples(run, spans, phases, config)}"]
    # A scheduler may call a node n1 whose own name is n1.cluster.
    sampled = {file.stem.split(".")[0] for file in (run.path / "monitor").glob("*.csv")}
    unsampled = sorted(str(host) for host in hosts if str(host).split(".")[0] not in sampled)
    return [f"there are no samples of {', '.join(unsampled[:8])}{' ...' if unsampled[8:] else ''}"] if unsampled else []


def _reason_for_no_samples(
    run: RunRecord, spans: Sequence[AttemptSpan], phases: Sequence[Phase], config: Mapping[str, Any]
) -> str:
    if config and config_value(config, "callbacks.monitor") is None:
        return "callbacks.monitor is off"
    start_seconds = {phase.attempt: phase.seconds for phase in phases if phase.name == "start"}
    every = config_value(config, "callbacks.monitor.every_seconds")
    longest_seconds = max(
        span.seconds - start_seconds.get(attempt.number, 0) for attempt, span in zip(run.attempts, spans, strict=True)
    )
    if longest_seconds < (every if isinstance(every, int | float) else DEFAULT_EVERY_SECONDS):
        return "the run ended before the first sample"
    return "there is no folder monitor/ (callbacks.monitor writes it)"
