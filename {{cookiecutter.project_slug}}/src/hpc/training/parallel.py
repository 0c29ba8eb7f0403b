"""What a strategy does to a network: tensor parallelism, activation checkpointing, compile, sharding, clipping.

A network takes part by naming its repeated `blocks` and, for tensor parallelism, by declaring `tensor_parallel_plan`.
DDP, ZeRO and the single device need nothing of this file but the two keys per block.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hpc.config.errors import ConfigError
from hpc.config.section_rules import SKIPPING_NEEDS_FUSED
from hpc.state.holders import GRADIENT_NORM, SKIPS_NOT_FINITE

# What is left on a module; a researcher has other names.
# Where torch keeps what is called with each forward, and with each gradient; it has no other way to go without.
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
KINDS = 64  # of blocks that differ in size or code, in training and in evaluation; more than that would not be compiled


def parallelize(
    network: Any,
    device_mesh: DeviceMesh | None,
    *,
    loss: nn.Module | None = None,
    activation_checkpointing: bool = False,
    compile: bool = False,
    channels_last: bool = False,
    keep_last: bool = True,
    precision: str = "32-true",
) -> None:
    """Prepare a network in place, once; calling it again changes nothing.

    Args:
        network: built whole, with the same weights on every rank.
        device_mesh: dimensions "data_parallel" and "tensor_parallel", from ModelParallelStrategy; None for the others.
        loss: logits and targets → scalar, to be compiled, too.
        activation_checkpointing: forget what is inside a block after forward and compute it again in backward.
        compile: each block by itself, so that one compilation serves all equal blocks and collectives stay outside;
            and what stands beside the blocks.
        channels_last: convolutions in the memory format that their fast kernels want; neither FSDP2 nor ZeRO can.
        keep_last: of shards: gather those of the last block once for forward and backward, which begins with it.
        precision: the Trainer's; with "bf16-mixed" shards are gathered in bf16 and gradients reduced in fp32.
    """
    if getattr(network, "is_parallelized", False):
        return
    network.is_parallelized = True
    if device_mesh is not None and device_mesh["tensor_parallel"].size() > 1:
        parallelize_module(network, device_mesh["tensor_parallel"], network.tensor_parallel_plan())
    if channels_last:
        network.to(memory_format=torch.channels_last)  # what has no four dimensions stays as it is
    for block in network.blocks if activation_checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if compile:
        _compile(network, loss)
    if device_mesh is not None and device_mesh["data_parallel"].size() > 1:
        _shard(network, device_mesh["data_parallel"], precision, keep_last)


def _compile(network: Any, loss: nn.Module | None) -> None:
    # DDP sends a bucket of gradients when the blocks in it are done. Cutting these once more is not needed, and fails
    # where activations are checkpointed.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = KINDS
    beside = [part for part in network.children() if part is not network.blocks and _computes(part)]
    for part in [*network.blocks, *beside, *([loss] if loss else [])]:
        # Not part.compile(): that leaves torch's own modules, and all that checkpoint() runs, as they are.
        # Blocks of other sizes are compiled once more, not once for all sizes: that would be slower.
        part.forward = torch.compile(part.forward, dynamic=False)


def _computes(part: nn.Module) -> bool:
    """Is there anything to compile in it? Not in a table, whose rows are only looked up, and not without weights."""
    return not isinstance(part, nn.Embedding) and next(part.parameters(), None) is not None


def _shard(network: Any, mesh: DeviceMesh, precision: str, keep_last: bool) -> None:
    """FSDP2: one group of parameters per block, gathered when the block runs; the rest is the root's group."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if precision == "bf16-mixed" else MixedPrecisionPolicy()
    for block in network.blocks:
        kept = keep_last and block is network.blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not kept)
    fully_shard(network, mesh=mesh, mp_policy=policy)


def clip_gradients(module: L.LightningModule, optimizer: Optimizer, clip_val: float | None) -> Tensor:
    """The global norm of all gradients, scalar; gradients are scaled down to `clip_val` where it is larger.

    With `trainer.gradient_clip_algorithm=value` each of their numbers is cut to [-clip_val, clip_val] instead.
    DeepSpeed owns its gradients and clips them itself (by `trainer.gradient_clip_val` too); what it reports is the norm
    of the step before.
    """
    if (norm := _deepspeed_norm(module)) is not None:
        return norm
    groups = _by_mesh(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    # There are none in the epoch that StochasticWeightAveraging adds for batch norm.
    norm = torch.stack([_whole(norm) for norm in norms]).norm() if norms else torch.zeros((), device=module.device)
    by_value = module.trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    if clip_val:
        for group in groups:
            clip_grad_value_(group, clip_val) if by_value else clip_grads_with_norm_(group, clip_val, norm)
    if getattr(module, SKIPS_NOT_FINITE, False):
        for optimizer in module.trainer.optimizers:
            _skip(optimizer, ~torch.isfinite(norm))
    setattr(module, GRADIENT_NORM, norm)
    return norm


def groups_by_mesh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer, cut so that its fused and foreach kernels take them; none is empty."""
    return [{**group, "params": params} for group in groups for params in _by_mesh(group["params"])]


def _skip(optimizer: Any, bad: Tensor) -> None:
    """Let an optimizer leave out its next step if `bad`, a scalar that no host looks at. Raises `ConfigError`."""
    if not all(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(
            "faults.nonfinite", "skip", SKIPPING_NEEDS_FUSED, f"{type(optimizer).__name__}(..., fused=True)"
        )
    optimizer.found_inf = bad.float()  # as torch.amp.GradScaler does it


def reject_without_skip(module: L.LightningModule) -> None:
    """Reject a module whose gradients Lightning clips, or nobody: no step would be left out."""
    if not (module.automatic_optimization and is_overridden("configure_gradient_clipping", module)):
        name = type(module).__name__
        rule = f"{name} must leave steps out itself: its configure_gradient_clipping must call clip_gradients"
        raise ConfigError(
            "faults.nonfinite", "skip", rule, f"faults.nonfinite=stop or rollback, or that method in {name}"
        )


def gradient_norm(module: L.LightningModule) -> Tensor | None:
    """The norm of the last step's gradients, scalar; None before the first and for a module that clips by itself."""
    norm = _deepspeed_norm(module)
    return getattr(module, GRADIENT_NORM, None) if norm is None else norm


def settle_buckets(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Let DDP choose the buckets it sums gradients in, by one backward whose gradients are thrown away.

    It chooses anew after the first backward, so a run that goes on would sum its first step in another order than the
    run it continues. The module's own forward and its hooks are not called: they may draw random numbers, count, or set
    themselves up by the first batch that they see.
    """
    ddp: Any = trainer.strategy.model
    if not isinstance(ddp, DistributedDataParallel):
        return
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    kept, forward = [buffer.clone() for buffer in module.buffers()], vars(module).get("forward")
    gradients = [parameter.grad for parameter in trained]
    ddp.zero_grad(set_to_none=True)
    module.forward = lambda: sum(0 * parameter.sum() for parameter in trained)  # type: ignore[assignment]
    try:
        with _without_hooks(module, trained):
            ddp().backward()
    finally:
        del module.forward
        vars(module).update({"forward": forward} if forward else {})
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    with torch.no_grad():  # DDP has sent rank 0's
        for buffer, value in zip(module.buffers(), kept, strict=True):
            buffer.copy_(value)


@contextmanager
def _without_hooks(module: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """A researcher's, of the module itself and of its parameters: one of them may be an optimizer's step."""
    hooks = [getattr(module, name) for name in HOOKS]
    hooks += [getattr(parameter, name) or {} for parameter in parameters for name in GRADIENT_HOOKS]
    before = [dict(some) for some in hooks]
    for some in hooks:
        some.clear()
    try:
        yield
    finally:
        for some, kept in zip(hooks, before, strict=True):
            some.update(kept)


def _deepspeed_norm(module: L.LightningModule) -> Tensor | None:
    engine: Any = module.trainer.model
    if not hasattr(engine, "get_global_grad_norm"):
        return None
    return torch.as_tensor(engine.get_global_grad_norm() or 0.0, device=module.device)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Kernels that take many tensors want those of one mesh; a network under tensor parallelism has several kinds."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[mesh].append(parameter)
    return list(groups.values())


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
