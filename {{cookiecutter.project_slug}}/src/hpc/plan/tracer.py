"""What a network costs, as lines over the micro-batch, from two runs of it on tensors without content.

`python -m hpc.plan.tracer` is a process of its own, which trace_cache.py starts: torch, and a network that
fails, stay out of the caller's.
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
from hpc.plan.fake_step import NotTraceable, Ran, cause, run
from hpc.plan.meter import Span, local, nbytes
from hpc.plan.trace_types import Linear, Part, Trace, Work

FEW, MORE = 2, 3  # examples of the two runs that each line goes through; one is too few for batch norm
DIRECTIONS = ("forward", "backward")
LIKELY = [2**power for power in range(20)]  # micro-batches


def trace(
    make: Callable[[], Any],
    optimize: Callable[[Any], Optimizer],
    parameters: str,
    autocast: str | None = None,
    tensor_parallel: int = 1,
) -> Trace:
    """Forward, cross-entropy and backward of a network, measured part by part, and a step of its optimizer.

    Args:
        make: → the network, with `example_input(batch_size)`, and `blocks` if it has any.
        optimize: parameters → the optimizer.
        parameters: what they are computed with: 64, 32, 16 or bf16.
        autocast: what it may compute with instead, on CUDA.
        tensor_parallel: ranks that share each layer, as the network's `tensor_parallel_plan` says.

    Raises:
        NotTraceable
    """
    for examples in (FEW, MORE) if tensor_parallel > 1 else ():  # what DTensor tries out at first is not the network's
        run(make, optimize, examples, parameters, autocast, tensor_parallel)
    few, more = (run(make, optimize, examples, parameters, autocast, tensor_parallel) for examples in (FEW, MORE))
    parts = tuple(_part(name, few, more) for name in few.names)
    unit, tokens = ("tokens", few.inputs) if few.text else ("samples", 1)
    return Trace(parts, unit, tokens, tensor_parallel, few.states, few.inputs)


def _part(name: str, few: Ran, more: Ran) -> Part:
    first, second = ({d: ran.meter.spans.get((name, d), Span()) for d in DIRECTIONS} for ran in (few, more))

    def line(size: Callable[[Any], float], *of: Any) -> Linear:
        return _line(*map(size, of or (first, second)))

    work = {d: _work(first[d].work, second[d].work) for d in first}
    sums = [[(0, size) for d in first for size in spans[d].reduced] for spans in (first, second)]
    owned = few.meter.owned(name)
    parameters = [state for state in owned if isinstance(state, Parameter)]
    return Part(
        name=name,
        parameters=sum(local(one).numel() for one in parameters),
        trained=sum(local(one).numel() for one in parameters if one.requires_grad),
        whole=sum(one.numel() for one in parameters),
        tensors=len(parameters),
        buffer_bytes=sum(nbytes(one) for one in owned if not isinstance(one, Parameter)),
        kept=line(lambda spans: spans["forward"].end - spans["forward"].begin),
        output=line(lambda ran: ran.outputs.get(name, 0), few, more),
        forward_peak=_highest(first["forward"].levels, second["forward"].levels),
        backward_peak=_highest(first["backward"].levels, second["backward"].levels),
        left=line(lambda spans: spans["backward"].end - spans["forward"].begin if spans["backward"].end else 0),
        forward=work["forward"],
        backward=work["backward"],
        reduced=_work(*sums),
        again=_work(*(spans["forward"].work[: spans["forward"].needed] for spans in (first, second))),
    )


def _line(few: float, more: float) -> Linear:
    each = (more - few) / (MORE - FEW)
    return Linear(few - each * FEW, each)


def _highest(few: list[int], more: list[int]) -> tuple[Linear, ...]:
    """Of the lines through the levels of both runs those that are highest for some batch: the peak may be another."""
    if len(few) != len(more):
        few, more = [max(few, default=0)], [max(more, default=0)]
    lines = set(map(_line, few, more)) | {Linear()}
    return tuple({max(lines, key=lambda line: line.at(examples)) for examples in LIKELY})


def _work(few: list[tuple[int, int]], more: list[tuple[int, int]]) -> tuple[Work, ...]:
    """Equal operations together. Of a network that does other things for other batches, the larger run's."""
    if len(few) != len(more):
        few = [(flops * FEW // MORE, size * FEW // MORE) for flops, size in more]
    alike = Counter(zip(few, more, strict=True))
    return tuple(Work(_line(a[0], b[0]), _line(a[1], b[1]), count) for (a, b), count in alike.items())


def main() -> None:
    """Questions as JSON on stdin; on stdout for each its trace, or {"error": why not}."""
    print(json.dumps([_answer(**question) for question in json.load(sys.stdin)]))


def _answer(network: dict[str, Any], optimizer: dict[str, Any], **how: Any) -> dict[str, Any]:
    make, optimize = (partial(build, OmegaConf.create(node)) for node in (network, optimizer))
    try:
        made = optimize()
    except Exception as error:
        return {"error": f"its optimizer: {cause(error)}"}
    try:
        return asdict(trace(make, made, **how))
    except NotTraceable as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
