"""The tracer of a training step: its cost over the micro-batch, from two or three runs on tensors without content.

trace_cache.py starts `python -m hpc.plan.tracer` as a process of its own, so that its caller need not import torch, and
does not fail if the module does.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import product, takewhile
from typing import Any

import lightning as L
from omegaconf import OmegaConf

from hpc.config.build import build
from hpc.plan.example_batches import ExampleBatches, UnreadableData
from hpc.plan.measured_step import MeasuredStep, Precision, measure_parameters, run_step
from hpc.plan.meter import Level, Meter, Operation
from hpc.plan.module_source import ModuleSource, NotTraceable
from hpc.plan.trace_types import BatchCost, MemoryLevel, Trace, Work

# Examples of the two runs that determine each line, and of a third one where costs are squares. A single one is too few
# for batch norm.
FEW, MORE, MOST = 2, 3, 4
LIKELY_BATCHES = [2**power for power in range(20)]  # examples per micro-batch
GRADIENT_BYTES = (0, 2, 4, 8)  # of a number; 0: where all gradients stay until the end of the step


def trace_step(
    make_module: Callable[[], L.LightningModule],
    parameters: str = "32",
    autocast: str | None = None,
    *,
    make_data: Callable[[], L.LightningDataModule] | None = None,
    tensor_parallel: int = 1,
    blocks: Any = None,
    checkpointing: bool = False,
    is_real: bool = False,
) -> Trace:
    """Measure a training step of a module: its loss, its batch, its networks, its optimizers.

    Args:
        make_module: returns the module. If it has `example_batch(num_examples)`, no data are needed.
        parameters: their precision in computation: 64, 32, 16 or bf16.
        autocast: the precision of CUDA's autocast; None: no autocast.
        make_data: returns the data module.
        tensor_parallel: ranks that share each layer, as the network's `tensor_parallel_plan` says.
        blocks: paths of the module's lists of blocks; None: they are found.
        checkpointing: whether activations inside the blocks are dropped, and computed again in backward.
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
        is_checkpointed=checkpointing,
        is_real=is_real,
    )
    for num_examples in (FEW, MORE) if tensor_parallel > 1 else ():  # DTensor's first runs do extra work of its own
        run(num_examples=num_examples)
    steps = [run(num_examples=num_examples) for num_examples in (FEW, MORE)]
    if _compares_examples(*(step.meter for step in steps)):
        steps.append(run(num_examples=MOST))
    return replace(
        _trace_of(steps),
        loader_batch_size=batches.loader_batch_size,
        loader_divides_by_ranks=batches.loader_divides_by_ranks,
        note=batches.note,
    )


def _trace_of(steps: Sequence[MeasuredStep]) -> Trace:
    """Return the trace of a step that was measured with `FEW`, `MORE` and perhaps `MOST` examples."""
    few, meters = steps[0], [step.meter for step in steps]
    num_trained = sum(group.num_trained_per_rank for group in few.groups)
    size = few.batch_size
    is_text = size is not None and size.unit == "tokens"
    return Trace(
        groups=few.groups,
        unit="tokens" if is_text else "samples",
        tokens_per_example=size.num_units // size.num_samples if size and is_text else 1,
        forward=_work(*(meter.forward for meter in meters)),
        backward=_work(*(meter.backward for meter in meters)),
        all_reduced=_work(*(meter.reduced for meter in meters)),
        levels=_highest_levels(*(meter.levels for meter in meters), num_trained=num_trained),
        optimizer_states=few.optimizer_states,
        numbers_per_example=few.numbers_per_example,
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
    states = step.optimizer_states
    return Trace(step.groups, "samples", 1, optimizer_states=states, by_parameters=reason)


def _compares_examples(few: Meter, more: Meter) -> bool:
    """Return whether some operation grows faster than the batch, as one on all pairs of its examples does."""
    works = (*_work(few.forward, more.forward), *_work(few.backward, more.backward))
    return any(cost.fixed < 0 for work in works for cost in (work.flops, work.bytes))


def _curve(few: float, more: float, most: float | None = None) -> BatchCost:
    """Return the line through the sizes of two runs, or the parabola through those of three."""
    slope, per_pair = (more - few) / (MORE - FEW), 0.0
    if most is not None:
        per_pair = ((most - more) / (MOST - MORE) - slope) / (MOST - FEW)
    per_example = slope - per_pair * (FEW + MORE)
    return BatchCost(few - (per_example + per_pair * FEW) * FEW, per_example, per_pair)


def _highest_levels(*runs: list[Level], num_trained: int) -> tuple[MemoryLevel, ...]:
    """Return those levels of all runs that are the highest for some micro-batch and some size of a gradient."""
    if len({len(levels) for levels in runs}) > 1:
        runs = tuple([Level(max(level.bytes for level in levels), 1.0, False)] for levels in runs)
    levels = {
        MemoryLevel(_curve(*(level.bytes for level in moment)), moment[0].gradients, moment[0].is_head)
        for moment in zip(*runs, strict=True)
    }

    def highest(among: Collection[MemoryLevel], examples: int, width: int) -> MemoryLevel:
        return max(among, key=lambda level: level.activations.at(examples) + width * num_trained * level.gradients)

    before_head = {level for level in levels if not level.is_head}  # where the head is left out
    return tuple(
        {
            highest(among, examples, width)
            for among in (levels, before_head)
            for examples, width in product(LIKELY_BATCHES, GRADIENT_BYTES)
            if among
        }
    )


def _work(*runs: list[Operation]) -> tuple[Work, ...]:
    """Group equal operations.

    Where the runs have different ones between their first and last operations, those of the second run count, as
    proportional.
    """
    first = list(takewhile(_is_same_operation, zip(*runs, strict=False)))
    rests = [run[len(first) :] for run in runs]
    last = list(takewhile(_is_same_operation, zip(*map(reversed, rests), strict=False)))
    matching = Counter(tuple((operation.flops, operation.bytes) for operation in same) for same in (*first, *last))
    between = Counter((operation.flops, operation.bytes) for operation in rests[1][: len(rests[1]) - len(last)])
    return (
        *(Work(_curve(*(flops for flops, _ in sizes)), _curve(*(size for _, size in sizes)), count)
          for sizes, count in matching.items()),
        *(Work(BatchCost(0.0, flops / MORE), BatchCost(0.0, size / MORE), count)
          for (flops, size), count in between.items()),
    )  # fmt: skip


def _is_same_operation(operations: tuple[Operation, ...]) -> bool:
    return len({operation.name for operation in operations}) == 1


def main() -> None:
    """Read a question as JSON from stdin, and print the trace, or {"error": reason}."""
    print(json.dumps(_answer(**json.load(sys.stdin))))


def _answer(
    *, model: dict[str, Any], data: dict[str, Any] | None, data_error: str, parameters: str, autocast: str | None,
    tensor_parallel: int, blocks: Any, checkpointing: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return a trace as plain data, or {"error": reason} if the module cannot be made."""
    make_module = partial(build, OmegaConf.create(model))
    options: dict[str, Any] = {"tensor_parallel": tensor_parallel, "blocks": blocks}

    def make_data() -> L.LightningDataModule:
        if data is None:
            raise UnreadableData(data_error)
        return build(OmegaConf.create(data))

    trace_module = partial(
        trace_step, make_module, parameters, autocast, make_data=make_data, checkpointing=checkpointing, **options
    )
    try:
        return asdict(trace_module())
    except (NotTraceable, UnreadableData) as error:
        reason, is_lasting = str(error), isinstance(error, NotTraceable)
    with suppress(NotTraceable, UnreadableData):
        if is_lasting and tensor_parallel == 1:
            trace = trace_module(is_real=True)
            notes = filter(None, [trace.note, f"measured on real samples, because {reason}"])
            return asdict(replace(trace, note="; ".join(notes)))
    try:
        trace = trace_parameters(make_module, parameters, reason=reason, **options)
    except NotTraceable:
        return {"error": reason}
    return asdict(trace) | {"is_lasting": is_lasting}


if __name__ == "__main__":
    main()
