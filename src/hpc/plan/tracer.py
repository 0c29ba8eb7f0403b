"""The tracer of a training step: its cost over the micro-batch, from two or three runs on tensors without content.

trace_cache.py starts `python -m hpc.plan.tracer` as a process of its own, so that its caller need not import torch, and
does not fail if the module does.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import lightning as L
from omegaconf import OmegaConf
from torch.nn import Parameter

from hpc.config.build import build
from hpc.plan.example_batches import ExampleBatches, UnreadableData
from hpc.plan.measured_step import MeasuredStep, ModuleSource, NotTraceable, Precision, measure_parameters, run_step
from hpc.plan.meter import PartRun, local_bytes, local_shard
from hpc.plan.part_boundaries import PartsOutOfOrder
from hpc.plan.trace_types import BatchCost, Part, Trace, Work

# Examples of the two runs that determine each line, and of a third one where costs are squares. A single one is too few
# for batch norm.
FEW, MORE, MOST = 2, 3, 4
LIKELY_BATCHES = [2**power for power in range(20)]  # examples per micro-batch


def trace_step(
    make_module: Callable[[], L.LightningModule],
    parameters: str = "32",
    autocast: str | None = None,
    *,
    make_data: Callable[[], L.LightningDataModule] | None = None,
    tensor_parallel: int = 1,
    blocks: Any = None,
    is_real: bool = False,
) -> Trace:
    """Measure a training step of a module part by part: its loss, its batch, its networks, its optimizers.

    Args:
        make_module: returns the module. If it has `example_batch(num_examples)`, no data are needed.
        parameters: their precision in computation: 64, 32, 16 or bf16.
        autocast: the precision of CUDA's autocast; None: no autocast.
        make_data: returns the data module.
        tensor_parallel: ranks that share each layer, as the network's `tensor_parallel_plan` says.
        blocks: paths of the module's lists of blocks; None: they are found.
        is_real: compute with values, on this machine.

    Raises:
        NotTraceable
        UnreadableData
    """
    batches = ExampleBatches(make_data)
    run = partial(
        run_step,
        ModuleSource(make_module, blocks),
        batches,
        precision=Precision(parameters, autocast),
        num_ranks=tensor_parallel,
        is_real=is_real,
    )
    for num_examples in (FEW, MORE) if tensor_parallel > 1 else ():  # DTensor's first runs do extra work of its own
        with suppress(PartsOutOfOrder):
            run(num_examples=num_examples)
    try:
        steps = [run(num_examples=num_examples) for num_examples in (FEW, MORE)]
    except PartsOutOfOrder:
        run = partial(run, in_parts=False)
        steps = [run(num_examples=num_examples) for num_examples in (FEW, MORE)]
    if _compares_examples(*steps):
        steps.append(run(num_examples=MOST))
    few = steps[0]
    # Parts say what checkpointing saves and repeats; a step that was measured as a whole does not.
    sizes = (FEW, MORE, MOST)[: len(steps)] if few.is_whole else ()
    checkpointed = [run(num_examples=num_examples, is_checkpointed=True) for num_examples in sizes]
    size = few.batch_size
    is_text = size is not None and size.unit == "tokens"
    return Trace(
        parts=tuple(_part(name, steps) for name in few.names),
        unit="tokens" if is_text else "samples",
        tokens_per_example=size.num_units // size.num_samples if size and is_text else 1,
        tensor_parallel=tensor_parallel,
        optimizer_states=few.optimizer_states,
        numbers_per_example=few.numbers_per_example,
        loader_batch_size=batches.loader_batch_size,
        loader_divides_by_ranks=batches.loader_divides_by_ranks,
        note=batches.note,
        checkpointed_parts=tuple(_part(name, checkpointed) for name in few.names if checkpointed),
    )


def trace_parameters(
    make_module: Callable[[], L.LightningModule],
    parameters: str,
    *,
    tensor_parallel: int,
    blocks: Any = None,
    reason: str,
) -> Trace:
    """Measure the parameters of a module alone, and the states of its optimizers.

    Args:
        reason: why its step is not measured.

    Raises:
        NotTraceable: the module cannot be made.
    """
    source = ModuleSource(make_module, blocks)
    step = measure_parameters(source, precision=Precision(parameters), num_ranks=tensor_parallel)
    return Trace(
        parts=tuple(_part(name, [step, step]) for name in step.names),
        unit="samples",
        tokens_per_example=1,
        tensor_parallel=tensor_parallel,
        optimizer_states=step.optimizer_states,
        by_parameters=reason,
    )


def _compares_examples(few: MeasuredStep, more: MeasuredStep) -> bool:
    """Return whether some operation grows faster than the batch, as one on all pairs of its examples does."""
    return any(
        cost.fixed < 0
        for key, run in few.meter.runs.items()
        for work in _work(run.work, more.meter.runs.get(key, PartRun()).work)
        for cost in (work.flops, work.bytes)
    )


def _part(name: str, steps: Sequence[MeasuredStep]) -> Part:
    forward, backward = (
        [step.meter.runs.get((name, direction), PartRun()) for step in steps] for direction in ("forward", "backward")
    )
    sums = [[(0, size) for run in runs for size in run.reduced] for runs in zip(forward, backward, strict=True)]
    leftover = [after.end - before.begin if after.end else 0 for before, after in zip(forward, backward, strict=True)]
    tensors = steps[0].meter.owned_tensors(name)
    parameters = [tensor for tensor in tensors if isinstance(tensor, Parameter)]
    return Part(
        name=name,
        num_parameters=sum(local_shard(parameter).numel() for parameter in parameters),
        num_trained_per_rank=sum(local_shard(parameter).numel() for parameter in parameters if parameter.requires_grad),
        num_parameters_all_ranks=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        buffer_bytes=sum(local_bytes(tensor) for tensor in tensors if not isinstance(tensor, Parameter)),
        saved=_curve(*(run.end - run.begin for run in forward)),
        output=_curve(*(step.output_bytes.get(name, 0) for step in steps)),
        forward_peak=_highest_curves(*(run.levels for run in forward)),
        backward_peak=_highest_curves(*(run.levels for run in backward)),
        leftover=_curve(*leftover),
        forward=_work(*(run.work for run in forward)),
        backward=_work(*(run.work for run in backward)),
        all_reduced=_work(*sums),
        recomputed=_work(*(run.work[: run.num_needed] for run in forward)),
    )


def _curve(few: float, more: float, most: float | None = None) -> BatchCost:
    """Return the line through the sizes of two runs, or the parabola through those of three."""
    slope, per_pair = (more - few) / (MORE - FEW), 0.0
    if most is not None:
        per_pair = ((most - more) / (MOST - MORE) - slope) / (MOST - FEW)
    per_example = slope - per_pair * (FEW + MORE)
    return BatchCost(few - (per_example + per_pair * FEW) * FEW, per_example, per_pair)


def _highest_curves(*runs: list[int]) -> tuple[BatchCost, ...]:
    """Return those curves through the levels of all runs that are the highest for some micro-batch."""
    if len({len(levels) for levels in runs}) > 1:
        runs = tuple([max(levels, default=0)] for levels in runs)
    curves = set(map(_curve, *runs)) | {BatchCost()}
    return tuple({max(curves, key=lambda curve: curve.at(examples)) for examples in LIKELY_BATCHES})


def _work(*runs: list[tuple[int, int]]) -> tuple[Work, ...]:
    """Group equal operations. If the runs have different operations, those of the second one count, as proportional."""
    if len({len(operations) for operations in runs}) > 1:
        return tuple(
            Work(BatchCost(0.0, flops / MORE), BatchCost(0.0, size / MORE), count)
            for (flops, size), count in Counter(runs[1]).items()
        )
    operations = Counter(zip(*runs, strict=True))
    return tuple(
        Work(_curve(*(flops for flops, _ in sizes)), _curve(*(size for _, size in sizes)), count)
        for sizes, count in operations.items()
    )


def main() -> None:
    """Read questions as JSON from stdin, and print for each its trace, or {"error": reason}."""
    print(json.dumps([_answer(**question) for question in json.load(sys.stdin)]))


def _answer(
    *, model: dict[str, Any], data: dict[str, Any] | None, data_error: str, parameters: str, autocast: str | None,
    tensor_parallel: int, blocks: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return a trace as plain data, or {"error": reason} if the module cannot be made."""
    make_module = partial(build, OmegaConf.create(model))
    options: dict[str, Any] = {"tensor_parallel": tensor_parallel, "blocks": blocks}

    def make_data() -> L.LightningDataModule:
        if data is None:
            raise UnreadableData(data_error)
        return build(OmegaConf.create(data))

    try:
        return asdict(trace_step(make_module, parameters, autocast, make_data=make_data, **options))
    except (NotTraceable, UnreadableData) as error:
        reason, is_lasting = str(error), isinstance(error, NotTraceable)
    with suppress(NotTraceable, UnreadableData):
        if is_lasting and tensor_parallel == 1:
            trace = trace_step(make_module, parameters, autocast, make_data=make_data, is_real=True, **options)
            notes = filter(None, [trace.note, f"measured on real samples, because {reason}"])
            return asdict(replace(trace, note="; ".join(notes)))
    try:
        trace = trace_parameters(make_module, parameters, reason=reason, **options)
    except NotTraceable:
        return {"error": reason}
    return asdict(trace) | {"is_lasting": is_lasting}


if __name__ == "__main__":
    main()
