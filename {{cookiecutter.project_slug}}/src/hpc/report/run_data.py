"""The data of one run: its directory, read once, and the scheduler's accounting. Imports no torch."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc.monitor import event_files, node_usage
from hpc.monitor.event_files import RunCurves
from hpc.monitor.node_usage import NodeSamples, Phase
from hpc.report import accounts, run_files, run_table
from hpc.report.accounts import JobAccount
from hpc.report.endings import Ending, attempt_endings
from hpc.report.run_statistics import AttemptSpan, RunStatistics, compute_statistics
from hpc.report.run_table import RunRow
from hpc.run import attempt_log, history, job_logs
from hpc.run.history import AttemptRecord, RunRecord

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
    accounts: list[JobAccount]
    no_accounts_reason: str
    statistics: RunStatistics
    network_table: str  # of a network check, which trains nothing
    has_times: bool  # False if the files are damaged that say how the time was spent
    notes: list[str]  # on missing or damaged files


def read_run_data(run: RunRecord) -> RunData:
    """Read a run directory. Data that cannot be read are missing, and `notes` say so."""
    row = run_table.query_row(run)
    curves, phases = event_files.read_curves(*attempt_log.curve_folders(run.path)), node_usage.read_phases(run.path)
    nodes, node_notes = node_usage.read_nodes(run.path)
    spans = attempt_spans(run, phases, is_running=_is_last_attempt_running(run, row))
    config_text, config, config_notes = run_files.read_config(run.path)
    made_by, made_by_notes = run_files.read_made_by(run.path)
    time_notes = run_files.time_damage_notes(run)
    statistics = compute_statistics(spans, phases, curves=curves, nodes=nodes, config=config)
    statistics = replace(statistics, steps_per_epoch=_steps_of_epoch(phases, row.step))
    if time_notes:
        statistics = replace(statistics, phase_seconds={}, phase_counts={})
    jobs = [attempt.job for attempt in run.attempts if attempt.job]
    job_accounts, no_accounts_reason = accounts.query_accounts(run_table.scheduler_of_run(run), jobs, {run.owner})
    network_table = job_logs.read_tail(run.path / "network.txt")
    notes = [*time_notes, *config_notes, *made_by_notes, *curves.notes, *node_notes]
    if not time_notes:
        notes += run_files.notes_on_clocks(nodes, spans)
    if not network_table:
        notes += run_files.notes_on_samples(run, nodes, spans=spans, phases=phases, config=config)
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
        accounts=job_accounts,
        no_accounts_reason=no_accounts_reason,
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
    if not any(node.gpu_columns("watts") for node in nodes):
        return None
    return sum(node.energy_joules() for node in nodes)
