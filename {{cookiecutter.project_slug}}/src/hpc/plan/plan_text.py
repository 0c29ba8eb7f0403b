"""A plan as a person reads it, as programs read it, and as a picture. Pure; no torch."""

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig

from hpc.charts.chart import Chart, Series
from hpc.charts.units import seconds, si
from hpc.plan.campaign import START, Checkpoint, Finish
from hpc.plan.memory import states
from hpc.plan.plan import SPARE, Plan, Row
from hpc.plan.step_time import flops


def lines(
    plan: Plan,
    title: str,
    *,
    finish: Finish | None,
    checkpoint: Checkpoint | None,
    changes: Sequence[str],
    notes: Sequence[str],
) -> list[str]:
    """Return one screen."""
    return [
        title,
        "",
        *_memory(plan),
        *(f"  to make it fit: {change}" for change in changes),
        "",
        *_time(plan),
        *(_finish(finish) if finish else []),
        *(_checkpoint(checkpoint) if checkpoint else []),
        *_scaling(plan),
        *(f"note: {note}" for note in notes),
    ]


def title(plan: Plan, *, strategy: str, gpu: str | None) -> str:
    """Return the first line: how large, how, on what."""
    layout = plan.setup
    several = "s" * (layout.world_size > 1)
    ranks = f"{layout.world_size} {gpu or ('GPU' if layout.accelerated else 'CPU rank') + several}"
    nodes = f"{layout.nodes} node{'s' * (layout.nodes > 1)}"
    each = f"{layout.micro_batch} at a time on each" + (f", {layout.accumulate} times a step" * (layout.accumulate > 1))
    return f"{si(plan.trace.whole)} parameters, {strategy}, {layout.precision}: {ranks} on {nodes}, {each}"


def notes(plan: Plan, cluster: DictConfig, *, steps: int | None, finish: Finish | None) -> list[str]:
    """Return what the plan does without, and what the project cannot run."""
    return [said for is_so, said in _notes(plan, cluster, steps=steps, finish=finish) if is_so]


def _notes(plan: Plan, cluster: DictConfig, *, steps: int | None, finish: Finish | None) -> list[tuple[object, str]]:
    setup, timed = plan.setup, plan.step is not None
    held = sum(states(plan.trace.whole, plan.trace.trained * setup.tensor_parallel, plan.trace.states, setup))
    lost = f"{START:.0f} s of a job are for starting, and some for ending"
    return [
        (not setup.accelerated, "a run on CPUs: only its memory is computed"),
        (setup.accelerated and plan.room is None,
         f"which GPU cluster={cluster.name} has is not known (cluster.gpu=), nor whether it fits"),
        (plan.room is not None and cluster.network_gbs is None,
         "cluster.network_gbs= is not known: what a node sends per second; only one node is timed"),
        (setup.pipeline > 1, "train.py has no pipeline: of these degrees it runs data and tensor parallelism"),
        (setup.compile and plan.fits is False, "torch.compile keeps less than is counted here: it may fit with it"),
        (setup.offload, f"each GPU has {held / 1e9:.1f} GB in its node's memory: a step takes longer than said here, "
                        "by the time to move them and of the optimizer there"),
        (plan.trace.states is None, "the optimizer cannot be tried on tensors without content: counted as AdamW's"),
        (plan.trace.whole and not flops(plan.trace, 1), "no operation with known FLOPs was seen: the step is longer"),
        (cluster.max_nodes and plan.scaling and cluster.max_nodes < plan.scaling[-1].nodes,
         f"cluster={cluster.name} gives {cluster.max_nodes} nodes at most"),
        (timed and steps is None,
         f"{plan.trace.examples_are}=1e9 or trainer.max_steps= tells the time to the end"),
        (timed and steps and finish is None, f"no time to the end: in cluster.time={cluster.time} not one step is "
                                             f"made, as {lost}: cluster.time=1:00:00, say"),
        (not timed and steps and plan.room is not None, "no time to the end: a step on these nodes is not known"),
    ]  # fmt: skip


def _memory(plan: Plan) -> list[str]:
    unit, size = ("GB", 1e9) if plan.memory.total >= 1e9 else ("MB", 1e6)
    shape = "9.2f" if plan.memory.total < 1e14 else "9.2e"
    rows = [f"  {name:<14}{held / size:{shape}}" for name, held in vars(plan.memory).items()]
    total = f"  {'total':<14}{plan.memory.total / size:{shape}}"
    if plan.room is not None and plan.margin is not None:
        left = f"{abs(plan.margin) / 1e9:.1f} GB"
        verdict = f"fits, {left} to spare" if plan.fits else f"does NOT fit, {left} too much"
        total += f" of {plan.room / size:.1f}, less {SPARE:.0%} that fragmentation may take: {verdict}"
    return [f"memory of a {'GPU' if plan.setup.accelerated else 'rank'} ({unit})", *rows, total]


def _time(plan: Plan) -> list[str]:
    if plan.step is None or plan.rate is None:
        return []
    step = plan.step
    parts = {name: getattr(step, name) for name in ("compute", "communication", "optimizer", "bubble")}
    split = ", ".join(f"{name} {share / step.seconds:.0%}" for name, share in parts.items() if share)
    mfu = f", MFU {plan.mfu:.0%}" if plan.mfu is not None else ""
    examples = plan.rate / plan.trace.tokens / plan.setup.nodes
    decoded = f", or decode {si(examples)} samples/s" if plan.trace.examples_are == "samples" else ""
    data = f"data: hidden while each node can read {si(plan.read_per_node or 0)}B/s of packed files{decoded}"
    return [f"a step: {seconds(step.seconds)} ({split}); {si(plan.rate)} {plan.trace.examples_are}/s{mfu}", data]


def _finish(finish: Finish) -> list[str]:
    starts = f"{finish.requeues} times started again" if finish.requeues else "in one job"
    hours = f"{finish.gpu_hours:,.0f}" if finish.gpu_hours >= 10 else f"{finish.gpu_hours:.2g}"
    return [f"to the end: {seconds(finish.seconds)}, {starts}, {hours} GPU-hours"]


def _checkpoint(checkpoint: Checkpoint) -> list[str]:
    every = f", best saved every {seconds(checkpoint.every_seconds)}" if checkpoint.every_seconds else ""
    return [f"a checkpoint: {si(checkpoint.bytes)}B, about {seconds(checkpoint.seconds)} to write{every}"]


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
    plan: Plan, *, finish: Finish | None, checkpoint: Checkpoint | None, changes: Sequence[str], notes: Sequence[str]
) -> dict[str, Any]:
    """Return it as plain data: bytes, seconds, examples or tokens; what is not known is None."""
    step = plan.step
    parts = ("seconds", "compute", "communication", "optimizer", "bubble")
    return {
        "setup": vars(plan.setup) | {"global_batch": plan.setup.global_batch},
        "parameters": plan.trace.whole,
        "memory": vars(plan.memory) | {"total": plan.memory.total, "room": plan.room, "margin": plan.margin},
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
