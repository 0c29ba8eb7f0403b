"""A training step of a network on tensors without content: without memory, without a device, for any size.

These are torch's fake tensors. They lie on the meta device, but kernels are chosen as on the CPU, because attention on
the meta device keeps its whole matrix of weights.
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

from hpc.plan.meter import CudaAutocast, Meter, local_bytes

DTYPES = {"64": torch.float64, "32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}


class NotTraceable(Exception):
    """The network cannot run on tensors without content; the message says at which operation."""


@dataclass(frozen=True)
class FakeStep:
    """A measured step."""

    names: list[str]  # of the parts
    meter: Meter
    output_bytes: dict[str, int]  # that each part hands on
    numbers_per_example: int  # in the input
    is_text: bool
    optimizer_states: float | None  # numbers that the optimizer keeps per parameter


def run_fake_step(
    make_network: Callable[[], Any],
    make_optimizer: Callable[[Any], Optimizer],
    *,
    num_examples: int,
    parameters: str,
    autocast: str | None,
    num_ranks: int,
) -> FakeStep:
    """Run forward, cross-entropy and backward, and a step of the optimizer. Arguments are those of `trace_network`.

    Raises:
        NotTraceable
    """
    with ExitStack() as stack:
        mesh = stack.enter_context(_fake_process_group(num_ranks)) if num_ranks > 1 else None
        stack.enter_context(FakeTensorMode())
        flags = torch.backends.mkldnn.set_flags(False)  # mkldnn's LSTM hides its matrix products
        stack.callback(torch.backends.mkldnn.set_flags, flags[0])
        meter = None
        try:
            network, inputs = _make_in_precision(make_network, num_examples, DTYPES[parameters])
            if mesh is not None:
                parallelize_module(network, mesh, network.tensor_parallel_plan())
            meter = stack.enter_context(Meter(network))
            output_bytes = _forward_and_backward(network, inputs, meter, autocast)
            optimizer_states = _optimizer_states(network, make_optimizer, meter)
            return FakeStep(
                names=_part_names(network),
                meter=meter,
                output_bytes=output_bytes,
                numbers_per_example=inputs[0].numel(),
                is_text=inputs.dtype == torch.int64,
                optimizer_states=optimizer_states,
            )
        except Exception as error:
            where = f"{meter.operation} in {meter.part}" if meter else "its constructor"
            raise NotTraceable(f"{where}: {root_cause(error)}") from error


def root_cause(error: BaseException) -> str:
    """Return the first line of the error that caused all others: Hydra wraps the error of a class."""
    while error.__cause__:
        error = error.__cause__
    if isinstance(error, DataDependentOutputException):
        return "it needs the value of a tensor, for .item() or a branch"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _make_in_precision(make: Callable[[], Any], num_examples: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Return network and inputs, made in a precision, because fake parameters cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        network = make().train()
        return network, network.example_input(num_examples)
    finally:
        torch.set_default_dtype(before)


def _part_names(network: Any) -> list[str]:
    blocks = [f"block {number}" for number in range(len(getattr(network, "blocks", ())))]
    return ["before", *blocks, "after", "loss"] if blocks else ["before", "loss"]


def _forward_and_backward(network: Any, inputs: Tensor, meter: Meter, autocast: str | None) -> dict[str, int]:
    """Run forward and backward with hooks that enter the meter's parts. Return the bytes that each part hands on."""
    *names, loss_name = _part_names(network)
    block_names = names[1:-1]
    output_bytes: dict[str, int] = {}

    def end_part(name: str, following: str, output: Any) -> None:
        tensor = next(t for t in tree_iter(output) if isinstance(t, Tensor))
        output_bytes[name] = local_bytes(tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda _: meter.enter(name, "backward"))
        meter.enter(following, "forward")

    if block_names:
        network.blocks[0].register_forward_pre_hook(lambda _, inputs: end_part("before", block_names[0], inputs))
        for block, name, following in zip(network.blocks, block_names, names[2:], strict=True):
            block.register_forward_hook(lambda _, __, output, n=name, f=following: end_part(n, f, output))
    with ExitStack() as stack:
        if autocast:
            stack.enter_context(torch.autocast("cpu", DTYPES[autocast]))
            stack.enter_context(CudaAutocast())
        meter.enter("before", "forward")
        stack.enter_context(saved_tensors_hooks(meter.mark_recompute_end, lambda tensor: tensor))
        network.register_forward_hook(lambda _, __, logits: end_part(names[-1], loss_name, logits))
        logits = network(inputs)
        if not isinstance(logits, Tensor):
            raise TypeError(f"it must return a tensor of logits, but returns {type(logits).__name__}")
        loss = _loss(logits.flatten(0, -2))
        del logits
    meter.enter(loss_name, "backward")
    loss.backward()
    meter.leave()
    return output_bytes


def _optimizer_states(network: Any, make_optimizer: Callable[[Any], Optimizer], meter: Meter) -> float | None:
    """Return how many numbers an optimizer keeps per parameter (AdamW: 2); None if it cannot be tried."""
    trained = [p for p in network.parameters() if p.grad is not None]
    # Kernels for many tensors at once reject a mixture of DTensors and plain tensors.
    parameters = [p for p in trained if isinstance(p, DTensor)] or trained
    meter.enter("optimizer", "step")  # its work belongs to no part
    before = meter.alive
    try:
        optimizer = make_optimizer(parameters)
        optimizer.step()
    except Exception:  # it needs a closure, or real numbers
        return None
    return (meter.alive - before) / sum(local_bytes(p) for p in parameters)


def _loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


@contextmanager
def _fake_process_group(num_ranks: int) -> Iterator[DeviceMesh]:
    """Open a process group whose other ranks do not exist: a collective acts as if all had sent the same."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()
