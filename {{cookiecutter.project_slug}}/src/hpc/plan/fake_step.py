"""One step of a network on tensors without content: no memory, no device, any size.

These are torch's fake tensors: of the meta device, but taken for the CPU's where kernels are chosen, as attention on
the meta device itself keeps its whole matrix of weights.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter

from hpc.plan.meter import CudaAutocast, Meter, nbytes

DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


class NotTraceable(Exception):
    """A network that cannot be run on tensors without content; the message says at which operation."""


@dataclass(frozen=True)
class Ran:
    """One run of a network."""

    names: list[str]  # of its parts
    meter: Meter
    outputs: dict[str, int]  # bytes that a part hands on
    inputs: int  # numbers in an example
    text: bool
    states: float | None  # what the optimizer keeps per parameter


def run(
    make: Callable[[], Any],
    optimize: Callable[[Any], Optimizer],
    examples: int,
    parameters: str,
    autocast: str | None,
    ranks: int,
) -> Ran:
    """Forward, cross-entropy and backward of `examples`, and a step of the optimizer. Words as for `trace.trace`.

    Raises:
        NotTraceable
    """
    with ExitStack() as stack:
        mesh = stack.enter_context(_pretended(ranks)) if ranks > 1 else None
        stack.enter_context(FakeTensorMode())
        before = torch.backends.mkldnn.set_flags(False)  # its LSTM hides matrix products
        stack.callback(torch.backends.mkldnn.set_flags, before[0])
        meter = None
        try:
            network, inputs = _made(make, examples, DTYPES[parameters])
            if mesh is not None:
                parallelize_module(network, mesh, network.tensor_parallel_plan())
            meter = stack.enter_context(Meter(network))
            outputs = _step(network, inputs, meter, autocast)
            states = _states(network, optimize, meter)
            return Ran(_names(network), meter, outputs, inputs[0].numel(), inputs.dtype == torch.int64, states)
        except Exception as error:
            where = f"{meter.last} in {meter.part}" if meter else "its making"
            raise NotTraceable(f"{where}: {cause(error)}") from error


def cause(error: BaseException) -> str:
    """A line about what was wrong first: Hydra wraps what a class says."""
    while error.__cause__:
        error = error.__cause__
    if isinstance(error, DataDependentOutputException):
        return "the value of a tensor is asked for, by .item() or a branch on it"
    said = str(error).strip().splitlines() or [type(error).__name__]
    return said[0]


def _made(make: Callable[[], Any], examples: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Network and inputs, made in that precision: fake parameters cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        network = make().train()
        return network, network.example_input(examples)
    finally:
        torch.set_default_dtype(before)


def _names(network: Any) -> list[str]:
    blocks = [f"block {number}" for number in range(len(getattr(network, "blocks", ())))]
    return ["before", *blocks, "after", "loss"] if blocks else ["before", "loss"]


def _step(network: Any, inputs: Tensor, meter: Meter, autocast: str | None) -> dict[str, int]:
    """Forward and backward, with hooks that tell the meter where a part begins; the bytes that each part hands on."""
    *names, loss_part = _names(network)
    blocks = names[1:-1]
    outputs: dict[str, int] = {}

    def ends(name: str, then: str, output: Any) -> None:
        tensor = next(t for t in tree_iter(output) if isinstance(t, Tensor))
        outputs[name] = nbytes(tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda _: meter.enter(name, "backward"))
        meter.enter(then, "forward")

    if blocks:
        network.blocks[0].register_forward_pre_hook(lambda _, given: ends("before", blocks[0], given))
        for block, name, then in zip(network.blocks, blocks, names[2:], strict=True):
            block.register_forward_hook(lambda _, __, output, name=name, then=then: ends(name, then, output))
    with ExitStack() as stack:
        if autocast:
            stack.enter_context(torch.autocast("cpu", DTYPES[autocast]))
            stack.enter_context(CudaAutocast())
        meter.enter("before", "forward")
        stack.enter_context(saved_tensors_hooks(meter.saved, lambda tensor: tensor))
        network.register_forward_hook(lambda _, __, logits: ends(names[-1], loss_part, logits))
        logits = network(inputs)
        if not isinstance(logits, Tensor):
            raise TypeError(f"what it returns is no tensor of logits: {type(logits).__name__}")
        loss = _loss(logits.flatten(0, -2))
        del logits
    meter.enter(loss_part, "backward")
    loss.backward()
    meter.leave()
    return outputs


def _states(network: Any, optimize: Callable[[Any], Optimizer], meter: Meter) -> float | None:
    """Numbers that an optimizer keeps for each parameter: AdamW two. None where it cannot be tried."""
    trained = [p for p in network.parameters() if p.grad is not None]
    of_one_kind = [p for p in trained if isinstance(p, DTensor)] or trained  # kernels for many want no other
    meter.enter("optimizer", "step")  # its work is no part's
    before = meter.alive
    try:
        optimizer = optimize(of_one_kind)
        optimizer.step()
    except Exception:  # a closure, or what only works on numbers
        return None
    return (meter.alive - before) / sum(nbytes(p) for p in of_one_kind)


def _loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


@contextmanager
def _pretended(ranks: int) -> Iterator[DeviceMesh]:
    """A process group whose other ranks do not exist; what it is given comes back as if all had sent the same."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()
