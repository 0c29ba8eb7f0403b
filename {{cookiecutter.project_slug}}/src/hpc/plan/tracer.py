"""The tracer of a network: its cost as lines over the micro-batch, from two runs on tensors without content.

trace_cache.py starts `python -m hpc.plan.tracer` as a process of its own, so that its caller need not import torch, and
does not fail if the network does.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from omegaconf import OmegaConf
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc.config.build import build
from hpc.plan.fake_step import FakeStep, NotTraceable, root_cause, run_fake_step
from hpc.plan.meter import PartRun, local_bytes, local_shard
from hpc.plan.trace_types import LinearCost, Part, Trace, Work

FEW, MORE = 2, 3  # examples of the two runs that determine each line; a single one is too few for batch norm
LIKELY_BATCHES = [2**power for power in range(20)]  # examples per micro-batch


def trace_network(
    make_network: Callable[[], Any],
    make_optimizer: Callable[[Any], Optimizer],
    parameters: str,
    autocast: str | None = None,
    *,
    tensor_parallel: int = 1,
) -> Trace:
    """Measure forward, cross-entropy and backward of a network part by part, and a step of its optimizer.

    Args:
        make_network: returns the network, with `example_input(batch_size)`, and `blocks` if it has any.
        make_optimizer: returns the optimizer of parameters.
        parameters: their precision in computation: 64, 32, 16 or bf16.
        autocast: the precision of CUDA's autocast; None: no autocast.
        tensor_parallel: ranks that share each layer, as the network's `tensor_parallel_plan` says.

    Raises:
        NotTraceable
    """
    run = partial(
        run_fake_step,
        make_network,
        make_optimizer,
        parameters=parameters,
        autocast=autocast,
        num_ranks=tensor_parallel,
    )
    for num_examples in (FEW, MORE) if tensor_parallel > 1 else ():  # DTensor's first runs do extra work of its own
        run(num_examples=num_examples)
    few, more = (run(num_examples=num_examples) for num_examples in (FEW, MORE))
    unit, tokens_per_example = ("tokens", few.numbers_per_example) if few.is_text else ("samples", 1)
    return Trace(
        parts=tuple(_part(name, few, more) for name in few.names),
        unit=unit,
        tokens_per_example=tokens_per_example,
        tensor_parallel=tensor_parallel,
        optimizer_states=few.optimizer_states,
        numbers_per_example=few.numbers_per_example,
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


def _answer(network: dict[str, Any], optimizer: dict[str, Any], **options: Any) -> dict[str, Any]:
    make_network, make_optimizer = (partial(build, OmegaConf.create(node)) for node in (network, optimizer))
    try:
        optimizer_of = make_optimizer()
    except Exception as error:
        return {"error": f"its optimizer: {root_cause(error)}"}
    try:
        return asdict(trace_network(make_network, optimizer_of, **options))
    except NotTraceable as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
