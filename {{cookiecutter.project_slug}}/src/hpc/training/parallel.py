"""Apply a strategy to a network: tensor parallelism, activation checkpointing, compilation, sharding, clipping.

A network takes part by naming its repeated `blocks` and, for tensor parallelism, by declaring `tensor_parallel_plan`.
Under DDP, ZeRO and on a single device only activation checkpointing and compilation apply.
"""

from collections import defaultdict
from collections.abc import Iterable
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
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hpc.config.errors import ConfigError
from hpc.config.section_rules import SKIPPING_NEEDS_FUSED
from hpc.state.holder_fields import GRADIENT_NORM, SKIPS_NOT_FINITE

MAX_COMPILED_VARIANTS = 64  # of blocks that differ in size, code or mode; torch would run further ones uncompiled


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
        loss: logits and targets → scalar; it is compiled, too.
        activation_checkpointing: drop the activations inside a block after forward; compute them again in backward.
        compile: compile each block by itself, so that one compilation serves all equal blocks and collectives stay
            outside; and the parts beside the blocks.
        channels_last: use the memory format of the fast convolution kernels; FSDP2 and ZeRO do not support it.
        keep_last: gather the shards of the last block once for forward and backward, as backward begins with it.
        precision: the Trainer's; with "bf16-mixed" shards are gathered in bf16 and gradients reduced in fp32.
    """
    if getattr(network, "is_parallelized", False):
        return
    network.is_parallelized = True
    if device_mesh is not None and device_mesh["tensor_parallel"].size() > 1:
        parallelize_module(network, device_mesh["tensor_parallel"], network.tensor_parallel_plan())
    if channels_last:
        network.to(memory_format=torch.channels_last)  # changes tensors of four dimensions only
    for block in network.blocks if activation_checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if compile:
        _compile(network, loss)
    if device_mesh is not None and device_mesh["data_parallel"].size() > 1:
        _shard(network, device_mesh["data_parallel"], precision=precision, keep_last=keep_last)


def _compile(network: Any, loss: nn.Module | None) -> None:
    """Compile the blocks, the parts beside them, and the loss, each by itself."""
    # DDP sends a bucket of gradients when the blocks in it are done. Dynamo need not split the blocks for that, and it
    # fails where activations are checkpointed.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = MAX_COMPILED_VARIANTS
    others = [part for part in network.children() if part is not network.blocks and _has_computation(part)]
    for part in [*network.blocks, *others, *([loss] if loss else [])]:
        # Not part.compile(): it leaves torch's own modules, and all that checkpoint() runs, uncompiled.
        # Blocks of other sizes are compiled separately (dynamic=False): one version for all sizes would be slower.
        part.forward = torch.compile(part.forward, dynamic=False)


def _has_computation(part: nn.Module) -> bool:
    """Return whether compiling a part helps: an embedding only looks up rows, and a part without weights is small."""
    return not isinstance(part, nn.Embedding) and next(part.parameters(), None) is not None


def _shard(network: Any, mesh: DeviceMesh, *, precision: str, keep_last: bool) -> None:
    """Shard with FSDP2: one group of parameters per block, gathered when the block runs, and one for the rest."""
    bf16_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16_policy if precision == "bf16-mixed" else MixedPrecisionPolicy()
    for block in network.blocks:
        is_kept = keep_last and block is network.blocks[-1]
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_kept)
    fully_shard(network, mesh=mesh, mp_policy=policy)


def clip_gradients(module: L.LightningModule, optimizer: Optimizer, clip_val: float | None) -> Tensor:
    """Scale all gradients down to the global norm `clip_val` if theirs is larger, and return their norm, a scalar.

    With `trainer.gradient_clip_algorithm=value` each number is clipped to [-clip_val, clip_val] instead. Under
    `faults.nonfinite=skip` the optimizers leave out a step whose norm is NaN or infinite. DeepSpeed clips its gradients
    itself, to `trainer.gradient_clip_val`; there the norm of the step before is returned.
    """
    if (norm := _deepspeed_norm(module)) is not None:
        return norm
    groups = _group_by_mesh(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    # There are no gradients in the epoch that StochasticWeightAveraging adds for batch norm.
    norm = torch.stack([_gather(norm) for norm in norms]).norm() if norms else torch.zeros((), device=module.device)
    is_by_value = module.trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    if clip_val:
        for group in groups:
            clip_grad_value_(group, clip_val) if is_by_value else clip_grads_with_norm_(group, clip_val, norm)
    if getattr(module, SKIPS_NOT_FINITE, False):
        for optimizer in module.trainer.optimizers:
            _skip_step_if(optimizer, ~torch.isfinite(norm))
    setattr(module, GRADIENT_NORM, norm)
    return norm


def split_groups_by_mesh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split an optimizer's parameter groups so that its fused and foreach kernels accept them; none is empty."""
    return [{**group, "params": params} for group in groups for params in _group_by_mesh(group["params"])]


def _skip_step_if(optimizer: Any, condition: Tensor) -> None:
    """Let an optimizer leave out its next step if `condition`, a scalar that stays on the device.

    Raises:
        ConfigError: the optimizer is not fused, and would ignore it.
    """
    if not all(group.get("fused") for group in optimizer.param_groups):
        raise ConfigError(
            "faults.nonfinite", "skip", SKIPPING_NEEDS_FUSED, f"{type(optimizer).__name__}(..., fused=True)"
        )
    optimizer.found_inf = condition.float()  # as torch.amp.GradScaler does it


def require_clip_gradients(module: L.LightningModule) -> None:
    """Raise `ConfigError` for a module that does not call `clip_gradients`, so that no step would be left out."""
    if not (module.automatic_optimization and is_overridden("configure_gradient_clipping", module)):
        name = type(module).__name__
        rule = f"{name} must leave steps out itself: its configure_gradient_clipping must call clip_gradients"
        raise ConfigError(
            "faults.nonfinite", "skip", rule, f"faults.nonfinite=stop or rollback, or that method in {name}"
        )


def last_gradient_norm(module: L.LightningModule) -> Tensor | None:
    """Return the gradient norm of the last step, a scalar; None before the first, or if the module clips by itself."""
    norm = _deepspeed_norm(module)
    return getattr(module, GRADIENT_NORM, None) if norm is None else norm


def _deepspeed_norm(module: L.LightningModule) -> Tensor | None:
    """Return the gradient norm that DeepSpeed reports for its last step; None under another strategy."""
    engine: Any = module.trainer.model
    if not hasattr(engine, "get_global_grad_norm"):
        return None
    return torch.as_tensor(engine.get_global_grad_norm() or 0.0, device=module.device)


def _group_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by device mesh. Kernels for many tensors need one mesh; tensor parallelism brings several."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[mesh].append(parameter)
    return list(groups.values())


def _gather(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
