"""The plan of a run, as text and as JSON. Pure; imports no torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc.charts.units import format_seconds, format_si
from hpc.config.sections import ClusterConfig
from hpc.plan.memory import offloaded_bytes
from hpc.plan.prediction import SPARE_SHARE, PredictedScalingRow, Prediction
from hpc.plan.step_time import forward_flops
from hpc.plan.whole_run import START_SECONDS, CheckpointCost, Finish

ACTIVATIONS = ("activations", "logits")  # that a plan by parameters alone does not count
STEP_PARTS = ("compute", "communication", "optimizer")


@dataclass(frozen=True)
class RunPlan:
    """A prediction, and what follows from it for the whole run: what plan.py prints."""

    prediction: Prediction
    title: str
    finish: Finish | None  # None: unknown
    checkpoint: CheckpointCost | None
    change: str | None  # overrides with which a run fits that does not
    notes: Sequence[str]


def as_text(plan: RunPlan) -> str:
    """Return the plan as one screen of text."""
    prediction = plan.prediction
    lines = [
        plan.title,
        *([prediction.trace.by_parameters_note] if prediction.trace.by_parameters else []),
        "",
        *_memory_lines(prediction),
        *([f"  to make it fit: {plan.change}"] if plan.change else []),
        "",
        *_step_lines(prediction),
        *([_finish_line(plan.finish)] if plan.finish else []),
        *([_checkpoint_line(plan.checkpoint)] if plan.checkpoint else []),
        *_scaling_lines(prediction),
        *(f"note: {note}" for note in plan.notes),
    ]
    return "\n".join(lines)


def title(prediction: Prediction, *, strategy: str, gpu: str | None) -> str:
    """Return the first line: the size of the network, the strategy, the devices, the micro-batch."""
    setup = prediction.setup
    device = gpu or f"{'GPU' if setup.accelerated else 'CPU rank'}{'s' * (setup.world_size > 1)}"
    devices = f"{setup.world_size} {device} on {setup.nodes} node{'s' * (setup.nodes > 1)}"
    batch = f"micro-batch {setup.micro_batch or 'as the loaders have it'}"
    batch += f", {setup.accumulate} micro-batches per step" * (setup.accumulate > 1)
    size = format_si(prediction.trace.num_parameters)
    return f"{size} parameters, {strategy}, {setup.precision}: {devices}, {batch}"


def notes(prediction: Prediction, cluster: ClusterConfig, *, steps: int | None, finish: Finish | None) -> list[str]:
    """Return notes on what the prediction leaves out, and on what the project cannot run.

    Args:
        steps: of the run; None: unknown.
    """
    setup, trace = prediction.setup, prediction.trace
    conditions = [
        (bool(trace.note), trace.note),
        (not setup.accelerated, "this run uses CPUs, for which only the memory is predicted"),
        (setup.accelerated and prediction.capacity is None,
         f"cluster={cluster.name} has no cluster.gpu, so it is unknown whether the run fits"),
        (prediction.capacity is not None and cluster.network_gbs is None and len(prediction.scaling) < 2,
         "cluster.network_gbs (GB/s that a node sends) is not set, so only one node is timed"),
        (setup.compile and prediction.fits is False,
         "torch.compile saves less for backward than is counted here, so the run may fit"),
        (setup.offload, _offload_note(prediction)),
        (trace.optimizer_states is None,
         "the optimizer cannot be made and run on tensors without content, so it is counted as AdamW"),
        (trace.num_parameters and not trace.by_parameters and not forward_flops(trace, 1),
         "no operation with known FLOPs was found, so a step takes longer than predicted"),
    ]  # fmt: skip
    return [note for is_true, note in conditions if is_true] + _end_notes(prediction, cluster, steps, finish)


def _offload_note(prediction: Prediction) -> str:
    offloaded, memory = offloaded_bytes(prediction.trace, prediction.setup), prediction.node_memory
    known = "which may be less (cluster.memory_gb is null)" if memory is None else f"which has {memory / 1e9:.0f} GB"
    return (
        f"{offloaded / 1e9:.1f} GB are offloaded to the main memory of each node, {known}; a step takes longer than "
        "predicted, by the time to move them and to run the optimizer there"
    )


def _end_notes(prediction: Prediction, cluster: ClusterConfig, steps: int | None, finish: Finish | None) -> list[str]:
    """Return a note if the time to the end of the run is not predicted."""
    if prediction.step is not None and steps is None:
        return [f"to predict the time to the end, add {prediction.trace.unit}=1e9 or trainer.max_steps="]
    if prediction.step is not None and steps and finish is None:
        return [
            f"the time to the end is unknown: cluster.time={cluster.time} is too short for a single step, because "
            f"{START_SECONDS:.0f} s of a job are for starting, and some for ending (cluster.time=1:00:00 is enough)"
        ]
    if prediction.trace.by_parameters:
        return []
    if prediction.step is None and steps and prediction.capacity is not None:
        return ["the time to the end is unknown, because the time of a step on these nodes is unknown"]
    return []


def _memory_lines(prediction: Prediction) -> list[str]:
    memory = prediction.memory
    unit, size = ("GB", 1e9) if memory.total >= 1e9 else ("MB", 1e6)
    width = "9.2f" if memory.total < 1e14 else "9.2e"
    unknown = ACTIVATIONS if prediction.trace.by_parameters else ()
    rows = [
        f"  {name:<14}{'not counted' if name in unknown else format(value / size, width):>9}"
        for name, value in vars(memory).items()
    ]
    total = f"  {'at least' if unknown else 'total':<14}{memory.total / size:{width}}"
    if prediction.capacity is not None and prediction.margin is not None:
        margin = f"{abs(prediction.margin) / 1e9:.1f} GB"
        verdict = f"does NOT fit, {margin} too much" if prediction.margin < 0 else f"fits, {margin} to spare"
        if prediction.trace.by_parameters and prediction.margin >= 0:
            verdict = f"{margin} are left for activations"
        total += f" of {prediction.capacity / size:.1f}, minus {SPARE_SHARE:.0%} for fragmentation: {verdict}"
    return [f"memory of a {'GPU' if prediction.setup.accelerated else 'rank'} ({unit})", *rows, total]


def _step_lines(prediction: Prediction) -> list[str]:
    step, trace = prediction.step, prediction.trace
    if step is None or prediction.rate is None:
        return []
    seconds = {part: getattr(step, part) for part in STEP_PARTS}
    parts = ", ".join(f"{part} {value / step.seconds:.0%}" for part, value in seconds.items() if value)
    mfu = f", MFU {prediction.mfu:.0%}" if prediction.mfu is not None else ""
    samples = prediction.rate / trace.tokens_per_example / prediction.setup.nodes
    or_decodes = f", or decodes {format_si(samples)} samples/s" if trace.unit == "samples" else ""
    packed = f"{format_si(prediction.read_bytes_per_second_per_node or 0)}B/s of packed files"
    return [
        f"a step: {format_seconds(step.seconds)} ({parts}); {format_si(prediction.rate)} {trace.unit}/s{mfu}",
        f"data: no step waits if each node reads {packed}{or_decodes}",
    ]


def _finish_line(finish: Finish) -> str:
    jobs = f"{finish.requeues + 1} jobs, one after the other" if finish.requeues else "one job"
    hours = f"{finish.gpu_hours:,.0f}" if finish.gpu_hours >= 10 else f"{finish.gpu_hours:.2g}"
    return f"to the end: {format_seconds(finish.seconds)} in {jobs}, {hours} GPU-hours"


def _checkpoint_line(checkpoint: CheckpointCost) -> str:
    every = f", best saved every {format_seconds(checkpoint.every_seconds)}" if checkpoint.every_seconds else ""
    return f"a checkpoint: {format_si(checkpoint.bytes)}B, about {format_seconds(checkpoint.seconds)} to write{every}"


def _scaling_lines(prediction: Prediction) -> list[str]:
    if not prediction.scaling:
        return []
    unit = f"{prediction.trace.unit}/s"
    titles = f"{'':13} {'with the same global batch':>28} {'with the same batch per GPU':>28}"
    cells = f" {unit:>14}{'efficiency':>14}"
    return ["", titles, f"{'nodes':>6}{'GPUs':>7}{cells}{cells}", *map(_scaling_line, prediction.scaling)]


def _scaling_line(row: PredictedScalingRow) -> str:
    cells = []
    for rate in (row.strong, row.weak):
        mark = "" if rate is None or rate.fits else " too big"
        efficiency = f"{rate.efficiency:.0%}" if rate else "-"
        cells.append(f" {format_si(rate.rate) if rate else '-':>14}{efficiency:>6}{mark:<8}")
    return f"{row.nodes:>6}{row.gpus:>7}{''.join(cells)}".rstrip()


def as_json(plan: RunPlan) -> str:
    """Return the plan as JSON, in bytes, seconds, and examples or tokens; unknown values are null."""
    prediction = plan.prediction
    step, memory, trace = prediction.step, prediction.memory, prediction.trace
    unknown = dict.fromkeys(ACTIVATIONS) if trace.by_parameters else {}
    sizes = {"total": memory.total, "room": prediction.capacity, "margin": prediction.margin}
    plain = {
        "setup": vars(prediction.setup) | {"global_batch": prediction.setup.global_batch},
        "parameters": trace.num_parameters,
        "memory": vars(memory) | unknown | sizes,
        "by_parameters": trace.by_parameters or None,
        "fits": prediction.fits,
        "change": plan.change,
        "step": {part: getattr(step, part) if step else None for part in ("seconds", *STEP_PARTS)} | {"data": None},
        "rate": prediction.rate,
        "read_per_node": prediction.read_bytes_per_second_per_node,
        "unit": trace.unit,
        "mfu": prediction.mfu,
        "scaling": [_row_as_dict(row) for row in prediction.scaling],
        "finish": vars(plan.finish) if plan.finish else None,
        "checkpoint": vars(plan.checkpoint) if plan.checkpoint else None,
        "notes": list(plan.notes),
    }
    return json.dumps(plain, indent=1)


def _row_as_dict(row: PredictedScalingRow) -> dict[str, Any]:
    rates = {"strong": row.strong, "weak": row.weak}
    return {"nodes": row.nodes, "gpus": row.gpus} | {name: vars(rate) if rate else None for name, rate in rates.items()}
