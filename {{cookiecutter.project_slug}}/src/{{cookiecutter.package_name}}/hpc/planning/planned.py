"""A plan as a person reads it, as programs read it, and as a picture. Pure; no torch."""

from collections.abc import Sequence
from typing import Any

from ..charts.chart import Chart, Series
from ..charts.units import seconds, si
from .campaign import Checkpoint, Finish
from .plan import SPARE, Plan, Row


def lines(
    plan: Plan, title: str, finish: Finish | None, checkpoint: Checkpoint | None, notes: Sequence[str]
) -> list[str]:
    """One screen."""
    return [
        title,
        "",
        *_memory(plan),
        "",
        *_time(plan),
        *(_finish(finish) if finish else []),
        *(_checkpoint(checkpoint) if checkpoint else []),
        *_scaling(plan),
        *(f"note: {note}" for note in notes),
    ]


def _memory(plan: Plan) -> list[str]:
    held = vars(plan.memory)
    rows = [f"  {name:<14}{size / 1e9:9.2f}" for name, size in held.items()]
    total = f"  {'total':<14}{plan.memory.total / 1e9:9.2f}"
    if plan.room is not None:
        left = plan.room * (1 - SPARE) - plan.memory.total
        verdict = f"fits, {left / 1e9:.1f} GB to spare" if plan.fits else f"does NOT fit, {-left / 1e9:.1f} GB too much"
        total += f" of {plan.room / 1e9:.1f}, of which {SPARE:.0%} are not promised: {verdict}"
    return ["memory of a GPU (GB)", *rows, total]


def _time(plan: Plan) -> list[str]:
    if plan.step is None or plan.rate is None:
        return []
    step = plan.step
    parts = {name: getattr(step, name) for name in ("compute", "communication", "optimizer", "bubble")}
    split = ", ".join(f"{name} {share / step.seconds:.0%}" for name, share in parts.items() if share)
    mfu = f", MFU {plan.mfu:.0%}" if plan.mfu is not None else ""
    data = f"data: hidden while each node can read {si(plan.read_per_node or 0)}B/s of packed files"
    return [f"a step: {seconds(step.seconds)} ({split}); {si(plan.rate)} {plan.trace.examples_are}/s{mfu}", data]


def _finish(finish: Finish) -> list[str]:
    starts = f"{finish.requeues} times started again" if finish.requeues else "in one job"
    return [f"to the end: {seconds(finish.seconds)}, {starts}, {finish.gpu_hours:,.0f} GPU-hours"]


def _checkpoint(checkpoint: Checkpoint) -> list[str]:
    every = f", best every {seconds(checkpoint.every_seconds)}" if checkpoint.every_seconds else ""
    return [f"a checkpoint: {checkpoint.bytes / 1e9:.1f} GB, about {seconds(checkpoint.seconds)} to write{every}"]


def _scaling(plan: Plan) -> list[str]:
    if not plan.scaling:
        return []
    unit = f"{plan.trace.examples_are}/s"
    kinds = f"{'':13} {'with the same global batch':>28} {'with the same batch per GPU':>28}"
    cells = f" {unit:>14}{'efficiency':>14}"
    return ["", kinds, f"{'nodes':>6}{'GPUs':>7}{cells}{cells}", *(_row(row) for row in plan.scaling)]


def _row(row: Row) -> str:
    cells = []
    for rate in (row.strong, row.weak):
        full = "" if rate is None or rate.fits else " too big"
        cells.append(f" {si(rate.rate) if rate else '-':>14}{f'{rate.efficiency:.0%}' if rate else '-':>6}{full:<8}")
    return f"{row.nodes:>6}{row.gpus:>7}{''.join(cells)}".rstrip()


def as_dict(
    plan: Plan, finish: Finish | None, checkpoint: Checkpoint | None, changes: Sequence[str], notes: Sequence[str]
) -> dict[str, Any]:
    """Bytes, seconds, examples or tokens; what is not known is None."""
    step = plan.step
    parts = ("seconds", "compute", "communication", "optimizer", "bubble")
    room = plan.room
    return {
        "parameters": plan.trace.parameters,
        "memory": vars(plan.memory)
        | {"total": plan.memory.total, "room": room, "margin": None if room is None else room - plan.memory.total},
        "fits": plan.fits,
        "changes": list(changes),
        "step": {part: getattr(step, part) if step else None for part in parts} | {"data": None},
        "rate": plan.rate,
        "read_per_node": plan.read_per_node,
        "unit": plan.trace.examples_are,
        "mfu": plan.mfu,
        "scaling": [_row_dict(row) for row in plan.scaling],
        "finish": vars(finish) if finish else None,
        "checkpoint": vars(checkpoint) if checkpoint else None,
        "notes": list(notes),
    }


def _row_dict(row: Row) -> dict[str, Any]:
    kinds = {"strong": row.strong, "weak": row.weak}
    return {"nodes": row.nodes, "gpus": row.gpus} | {name: vars(rate) if rate else None for name, rate in kinds.items()}


def charts(plan: Plan) -> list[Chart]:
    """Rate and efficiency over nodes."""
    kinds = {"same global batch": "strong", "same batch per GPU": "weak"}
    rows = {name: [(row.nodes, getattr(row, kind)) for row in plan.scaling] for name, kind in kinds.items()}
    named = {name: [(nodes, rate) for nodes, rate in found if rate] for name, found in rows.items()}
    rates = [Series(name, [(nodes, rate.rate) for nodes, rate in found]) for name, found in named.items()]
    shares = [Series(name, [(nodes, 100 * rate.efficiency) for nodes, rate in found]) for name, found in named.items()]
    unit = f"{plan.trace.examples_are} per second"
    return [
        Chart("Predicted rate", "nodes", unit, rates, log_x=True, log_y=True),
        Chart("Predicted efficiency", "nodes", "% of the rate per GPU on one node", shares, log_x=True),
    ]
