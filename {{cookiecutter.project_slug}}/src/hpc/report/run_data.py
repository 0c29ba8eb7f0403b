"""All that is known of one run: its directory, read once, and what the scheduler has counted. Imports no torch."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc.monitor import event_files, node_usage
from hpc.monitor.event_files import Curves
from hpc.monitor.node_usage import Node, Phase
from hpc.report import accounts, damage, run_table
from hpc.report.accounts import Account
from hpc.report.endings import Ending, endings
from hpc.report.numbers import Numbers, Span, numbers
from hpc.report.run_table import Row
from hpc.run import attempt_log, history, job_logs
from hpc.run.history import AttemptRecord, RunRecord


@dataclass(frozen=True)
class Measured:
    """All that a page shows."""

    run: RunRecord
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
    network: str  # the table of a check of the network, which trains nothing
    whole: bool  # it is known how the time was spent
    notes: list[str]  # what is damaged or missing


def measure(run: RunRecord) -> Measured:
    """Read all of a run directory; what cannot be read is missing, and said so."""
    row = run_table.one(run)
    curves, phases = event_files.read(*attempt_log.log_dirs(run.path)), node_usage.phases(run.path)
    nodes, notes = node_usage.nodes(run.path)
    goes_on = row.state in run_table.ACTIVE - {"running?"} and row.job == (
        run.attempts[-1].job if run.attempts else None
    )
    spans = attempts(run, phases, goes_on)
    config_text, config, no_config = damage.config(run.path)
    made_by, no_origin = damage.made_by(run.path)
    no_times = damage.of_times(run)
    jobs = [attempt.job for attempt in run.attempts if attempt.job]
    found, why = accounts.ask(run_table.scheduler(run), jobs, {run.owner})
    told = replace(numbers(spans, phases, curves, nodes, config), steps=_epoch(phases, row.step))
    around = [] if no_times else damage.clocks(nodes, spans)
    network = job_logs.read_tail(run.path / "network.txt")
    silent = [] if network else damage.silent(run, nodes, spans, phases, config)
    return Measured(
        run=run,
        row=row,
        config=config,
        config_text=config_text,
        made_by=made_by,
        spans=spans,
        endings=endings(run, row, phases),
        curves=curves,
        nodes=nodes,
        phases=phases,
        joules=sum(node.energy() for node in nodes) if any(node.gpus("watts") for node in nodes) else None,
        accounts=found,
        no_accounts=why,
        numbers=replace(told, wall={}, times={}) if no_times else told,
        network=network,
        whole=not no_times,
        notes=[*no_times, *no_config, *no_origin, *curves.notes, *notes, *around, *silent],
    )


def attempts(run: RunRecord, phases: Sequence[Phase], active: bool) -> list[Span]:
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
            end = time.time() if active and limit == math.inf else history.last_sign_of_life(run, attempt, until=limit)
        spans.append(Span(begin, max(min(end, limit), begin), attempt.end is not None))
    return spans


def _epoch(phases: Sequence[Phase], made: int | None) -> int | None:
    """Steps of an epoch, or all that were made where it did not come to the end of one."""
    ends = [phase.step for phase in phases if phase.what == "epoch" and phase.step > 0]
    return min([*ends, *([made] if made else [])], default=None)


def _begin(attempt: AttemptRecord, phases: Sequence[Phase]) -> float:
    """Rank 0 notes an attempt when it has found its checkpoint; the process has begun before."""
    starts = [phase.begin for phase in phases if phase.attempt == attempt.number and phase.what == "start"]
    return min([attempt.start, *(start for start in starts if attempt.start - start < 3600)])
