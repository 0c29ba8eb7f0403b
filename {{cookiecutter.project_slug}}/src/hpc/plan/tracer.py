"""The tracer of a training step: its cost as lines over the micro-batch, from two runs on tensors without content.

trace_cache.py starts `python -m hpc.plan.tracer` as a process of its own, so that its caller need not import torch, and
does not fail if the module does.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import lightning as L
from omegaconf import OmegaConf
from torch.nn import Parameter

from hpc.config.build import build
from hpc.plan.example_batches import ExampleBatches, UnreadableData
from hpc.plan.fake_step import FakeStep, ModuleSource, NotTraceable, Precision, measure_parameters, run_fake_step
from hpc.plan.meter import PartRun, local_bytes, local_shard
from hpc.plan.part_boundaries import PartsOutOfOrder
from hpc.plan.trace_types import LinearCost, Part, Trace, Work

FEW, MORE = 2, 3  # examples of the two runs that determine each line; a single one is too few for batch norm
LIKELY_BATCHES = [2**power for power in range(20)]  # examples per micro-batch


def trace_step(
    make_module: Callable[[], L.LightningModule],
    parameters: str = "32",
    autocast: str | None = None,
    *,
    make_data: Callable[[], L.LightningDataModule] | None = None,
    tensor_parallel: int = 1,
    blocks: Any = None,
) -> Trace:
    """Measure a training step of a module part by part: its loss, its batch, its networks, its optimizers.

    Args:
        make_module: returns the module. If it has `example_batch(num_examples)`, no data are needed.
        parameters: their precision in computation: 64, 32, 16 or bf16.
        autocast: the precision of CUDA's autocast; None: no autocast.
        make_data: returns the data module.
        tensor_parallel: ranks that share each layer, as the network's `tensor_parallel_plan` says.
        blocks: paths of the module's lists of blocks; None: they are found.

    Raises:
        NotTraceable
        UnreadableData
    """
    batches = ExampleBatches(make_data)
    run = partial(
        run_fake_step,
        ModuleSource(make_module, blocks),
        batches,
        precision=Precision(parameters, autocast),
        num_ranks=tensor_parallel,
    )
    for num_examples in (FEW, MORE) if tensor_parallel > 1 else ():  # DTensor's first runs do extra work of its own
        with suppress(PartsOutOfOrder):
            run(num_examples=num_examples)
    try:
        few, more = (run(num_examples=num_examples) for num_examples in (FEW, MORE))
    except PartsOutOfOrder:
        few, more = (run(num_examples=num_examples, in_parts=False) for num_examples in (FEW, MORE))
    size = few.batch_size
    is_text = size is not None and size.unit == "tokens"
    return Trace(
        parts=tuple(_part(name, few, more) for name in few.names),
        unit="tokens" if is_text else "samples",
        tokens_per_example=size.num_units // size.num_samples if size and is_text else 1,
        tensor_parallel=tensor_parallel,
        optimizer_states=few.optimizer_states,
        numbers_per_example=few.numbers_per_example,
        loader_batch_size=batches.loader_batch_size,
        note=batches.note,
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
        parts=tuple(_part(name, step, step) for name in step.names),
        unit="samples",
        tokens_per_example=1,
        tensor_parallel=tensor_parallel,
        optimizer_states=step.optimizer_states,
        by_parameters=reason,
    )


def _part(name: str, few: FakeStep, more: FakeStep) -> Part:
    forward, backward = (
        [step.meter.runs.get((name, direction), PartRun()) for step in (few, more)]
        for direction in ("forward", "backward")
    )
    sums = [[(0, size) for run in runs for size in run.reduced] for runs in zip(forward, backward, strict=True)]
    leftover = [after.end - before.begin if after.end else 0 for before, after in zip(forward, backward, strict=True)]
    tensors = few.meter.owned_tensors(name)
    parameters = [tensor for tensor in tensors if isinstance(tensor, Parameter)]
    return Part(
        name=name,
        num_parameters=sum(local_shard(parameter).numel() for parameter in parameters),
        num_trained_per_rank=sum(local_shard(parameter).numel() for parameter in parameters if parameter.requires_grad),
        num_parameters_all_ranks=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        buffer_bytes=sum(local_bytes(tensor) for tensor in tensors if not isinstance(tensor, Parameter)),
        saved=_line(*(run.end - run.begin for run in forward)),
        output=_line(*(step.output_bytes.get(name, 0) for step in (few, more))),
        forward_peak=_highest_lines(*(run.levels for run in forward)),
        backward_peak=_highest_lines(*(run.levels for run in backward)),
        leftover=_line(*leftover),
        forward=_work(*(run.work for run in forward)),
        backward=_work(*(run.work for run in backward)),
        all_reduced=_work(*sums),
        recomputed=_work(*(run.work[: run.num_needed] for run in forward)),
    )


def _line(few: float, more: float) -> LinearCost:
    """Return the line through the sizes of both runs."""
    per_example = (more - few) / (MORE - FEW)
    return LinearCost(few - per_example * FEW, per_example)


def _highest_lines(few: list[int], more: list[int]) -> tuple[LinearCost, ...]:
    """Return those lines through the levels of both runs that are the highest for some micro-batch."""
    if len(few) != len(more):
        few, more = [max(few, default=0)], [max(more, default=0)]
    lines = set(map(_line, few, more)) | {LinearCost()}
    return tuple({max(lines, key=lambda line: line.at(examples)) for examples in LIKELY_BATCHES})


def _work(few: list[tuple[int, int]], more: list[tuple[int, int]]) -> tuple[Work, ...]:
    """Group equal operations. If both runs have different operations, those of the larger run count."""
    if len(few) != len(more):
        few = [(flops * FEW // MORE, size * FEW // MORE) for flops, size in more]
    counts = Counter(zip(few, more, strict=True))
    return tuple(Work(_line(a[0], b[0]), _line(a[1], b[1]), count) for (a, b), count in counts.items())


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
    try:
        trace = trace_parameters(make_module, parameters, reason=reason, **options)
    except NotTraceable:
        return {"error": reason}
    return asdict(trace) | {"is_lasting": is_lasting}


if __name__ == "__main__":
    main()
