"""The data of one run, from its directory, which is read once."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hpc.monitor import event_files, node_usage
from hpc.monitor.event_files import RunCurves
from hpc.monitor.node_usage import NodeSamples, Phase
from hpc.report import run_table
from hpc.report.endings import Ending, attempt_endings
from hpc.report.run_statistics import AttemptSpan, RunStatistics, compute_statistics
from hpc.report.run_table import RunRow
from hpc.report.slow_rank import find_slow_rank
from hpc.run import attempt_log, history, job_logs
from hpc.run.history import AttemptRecord, RunRecord
from hpc.system.files import parse_json

MAX_START_UP_SECONDS = 3600  # between the start of a process and the start of its attempt


@dataclass(frozen=True)
class RunData:
    """Everything that a report shows of a run."""

    run: RunRecord
    row: RunRow
    config: dict[str, Any]
    config_text: str
    made_by: dict[str, Any]
    spans: list[AttemptSpan]
    endings: list[Ending]
    curves: RunCurves
    nodes: list[NodeSamples]
    phases: list[Phase]
    joules: float | None
    statistics: RunStatistics
    network_table: str  # of a network check, which trains nothing
    has_times: bool  # False if the files are damaged that say how the time was spent
    notes: list[str]  # on missing or damaged files


def read_run_data(run: RunRecord) -> RunData:
    """Read a run directory. Data that cannot be read are missing, and `notes` say so."""
    ((row,), _) = run_table.query_rows([run])
    curves, phases = event_files.read_curves(*attempt_log.curve_folders(run.path)), node_usage.read_phases(run.path)
    nodes, node_notes = node_usage.read_nodes(run.path)
    spans = attempt_spans(run, phases, is_running=_is_last_attempt_running(run, row))
    config_text = job_logs.read_tail(run.path / "config.yaml")
    config, made_by = _read_config(config_text), _read_json(run.path / "made_by.json")
    time_notes = _time_notes(run)
    statistics = compute_statistics(spans, phases, curves=curves, nodes=nodes, config=config)
    slow_rank = find_slow_rank(curves, run.attempts[-1] if run.attempts else None)
    statistics = replace(statistics, steps_per_epoch=_steps_of_epoch(phases, row.step), slow_rank=slow_rank)
    if time_notes:
        statistics = replace(statistics, phase_seconds={}, phase_counts={})
    network_table = job_logs.read_tail(run.path / "network.txt")
    damaged = [
        name
        for name, content in {"config.yaml": config, "made_by.json": made_by}.items()
        if not content and (run.path / name).exists()
    ]
    notes = [*time_notes, *(f"{name} is damaged" for name in damaged), *curves.notes, *node_notes]
    notes += [] if network_table else [*_sample_notes(run, nodes), *_curve_notes(config, curves)]
    return RunData(
        run=run,
        row=row,
        config=config,
        config_text=config_text,
        made_by=made_by,
        spans=spans,
        endings=attempt_endings(run, row, phases),
        curves=curves,
        nodes=nodes,
        phases=phases,
        joules=_joules(nodes),
        statistics=statistics,
        network_table=network_table,
        has_times=not time_notes,
        notes=notes,
    )


def attempt_spans(run: RunRecord, phases: Sequence[Phase], *, is_running: bool) -> list[AttemptSpan]:
    """Return begin and end of each attempt.

    An attempt that recorded no end lasted until its last sign of life before the next attempt.

    Args:
        is_running: the scheduler says that the last attempt is still running.
    """
    begins = [_begin(attempt, phases) for attempt in run.attempts]
    spans: list[AttemptSpan] = []
    for index, (attempt, begin) in enumerate(zip(run.attempts, begins, strict=True)):
        limit = begins[index + 1] if index + 1 < len(begins) else math.inf
        if attempt.end:
            end = attempt.end["time"]
        else:
            end = (
                time.time()
                if is_running and limit == math.inf
                else history.last_sign_of_life(run, attempt, until=limit)
            )
        spans.append(AttemptSpan(begin, max(min(end, limit), begin), attempt.end is not None))
    return spans


def _is_last_attempt_running(run: RunRecord, row: RunRow) -> bool:
    """Return whether the scheduler says so; "running?" is only a guess."""
    newest_job = run.attempts[-1].job if run.attempts else None
    return row.state in run_table.ACTIVE - {"running?"} and row.job == newest_job


def _steps_of_epoch(phases: Sequence[Phase], last_step: int | None) -> int | None:
    """Return the steps of an epoch, or all that were made if the run did not reach the end of one."""
    ends = [phase.step for phase in phases if phase.name == "epoch" and phase.step > 0]
    return min([*ends, *([last_step] if last_step else [])], default=None)


def _begin(attempt: AttemptRecord, phases: Sequence[Phase]) -> float:
    """Return when the process of rank 0 started, which was before it noted the attempt."""
    starts = [phase.begin for phase in phases if phase.attempt == attempt.number and phase.name == "start"]
    return min([attempt.start, *(start for start in starts if attempt.start - start < MAX_START_UP_SECONDS)])


def _joules(nodes: Sequence[NodeSamples]) -> float | None:
    known = [joules for node in nodes if (joules := node.energy_joules()) is not None]
    return sum(known) if known else None


def _time_notes(run: RunRecord) -> list[str]:
    """Return notes on damage after which it is unknown how the time was spent."""
    damaged = {
        "attempts.jsonl": history.num_damaged_lines(run.path),
        "monitor/phases.jsonl": node_usage.count_damaged_phases(run.path),
    }
    notes = [f"{file}: {count} damaged line(s) left out" for file, count in damaged.items() if count]
    if not notes and not run.attempts and run.verdict:
        notes.append("attempts.jsonl records no attempt, although there is a verdict")
    return notes


def _read_config(text: str) -> dict[str, Any]:
    """Return the content of config.yaml; empty if it is damaged, also if its last newline is missing.

    Half of a YAML file may be valid, too.
    """
    try:
        content = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if text.endswith("\n") else None
    except (yaml.YAMLError, ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(job_logs.read_tail(path))
    except (ValueError, RecursionError):
        content = None
    return content if isinstance(content, dict) else {}


def _curve_notes(config: Mapping[str, Any], curves: RunCurves) -> list[str]:
    """Return a note if the run has no curves because none of its loggers writes what is read."""
    if curves.points or "logger" not in config or "TensorBoardLogger" in str(config["logger"]):
        return []
    return ["there are no curves: they are read from TensorBoard's files, which logger=[tensorboard,...] writes"]


def _sample_notes(run: RunRecord, nodes: Sequence[NodeSamples]) -> list[str]:
    """Return a note if nodes of the run have no samples."""
    hosts = {str(host) for attempt in run.attempts for host in attempt.hosts}
    if hosts and not nodes:
        return ["there are no samples of any node: callbacks.monitor is off, or the run ended before the first one"]
    # A scheduler may call a node n1 whose own name is n1.cluster.
    sampled = {node.host.split(".")[0] for node in nodes}
    unsampled = sorted(host for host in hosts if host.split(".")[0] not in sampled)
    return [f"there are no samples of {', '.join(unsampled[:8])}{' ...' if unsampled[8:] else ''}"] if unsampled else []
