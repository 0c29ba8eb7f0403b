"""Apply a strategy to a module: tensor parallelism, activation checkpointing, compilation, sharding.

Every LightningModule can be sharded, recomputed and compiled by its blocks; see `find_blocks`. For tensor parallelism,
it or its network declares a `tensor_parallel_plan`.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from hpc.config.errors import ConfigError, join_names
from hpc.privates.torch import compile_blocks_alone, has_gradient_hook
from hpc.strategies.blocks import Blocks, find_blocks
from hpc.strategies.gathering import gather_for_steps, parts_with_parameters
from hpc.strategies.gradients import clip_by_norm
from hpc.strategies.sharded_parameters import Gathers, watch
from hpc.strategies.sharded_tensors import complete_dtensor

MAX_COMPILED_VARIANTS = 64  # of blocks that differ in size, code or mode; torch would run further ones uncompiled


@dataclass(frozen=True)
class ModuleChanges:
    """The changes to a module that the config names in its section `strategy`.

    Attributes:
        blocks: paths of the lists of blocks; None: they are found.
        activation_checkpointing: drop the activations inside a block after forward; compute them again in backward.
        compile: compile each block by itself, so that one compilation serves all equal blocks and collectives stay
            outside; and the parts beside the blocks.
        channels_last: use the memory format of the fast convolution kernels; FSDP2 and ZeRO do not support it.
        precision: the Trainer's; with "bf16-mixed" shards are gathered in bf16 and gradients reduced in fp32.
    """

    blocks: str | Sequence[str] | None = None
    activation_checkpointing: bool = False
    compile: bool = False
    channels_last: bool = False
    precision: str = "32-true"


def parallelize(
    module: L.LightningModule,
    device_mesh: DeviceMesh | None,
    changes: ModuleChanges,
    *,
    meet_to_read: Callable[[], None] = lambda: None,
) -> Gathers | None:
    """Prepare a module in place, once; calling it again changes nothing. Return what notes how FSDP gathers it.

    Args:
        module: built whole, with the same weights on every rank.
        device_mesh: dimensions "data_parallel" and "tensor_parallel", from ModelParallelStrategy; None for the others.
        meet_to_read: is called before ranks read a number of a sharded parameter, which all of them must do.

    Raises:
        ConfigError: the module lacks what the config asks for.
    """
    if module.__dict__.get("is_parallelized"):
        return None
    reject_lazy_layers(module)
    module.__dict__["is_parallelized"] = True
    mesh = device_mesh["data_parallel"] if device_mesh is not None else None
    shards = mesh is not None and mesh.size() > 1
    is_sharded_already = any(isinstance(part, FSDPModule) for part in module.modules())
    blocks = find_blocks(module, changes.blocks)
    if changes.activation_checkpointing and not blocks:
        rule = f"must be false for {type(module).__name__}, which has no list of equal blocks to recompute"
        fix = "strategy.activation_checkpointing=false, or strategy.blocks=<path of a torch.nn.ModuleList>"
        raise ConfigError("strategy.activation_checkpointing", True, rule, fix)
    if shards or changes.activation_checkpointing or changes.compile or changes.blocks:
        _print_blocks(module, blocks, is_sharded_already=is_sharded_already)
    if device_mesh is not None and device_mesh["tensor_parallel"].size() > 1:
        network = planned_part(module)
        parallelize_module(network, device_mesh["tensor_parallel"], network.tensor_parallel_plan())
    if changes.channels_last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # only tensors of four dimensions
    for block in blocks.modules if blocks and changes.activation_checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if changes.compile:
        _compile(module, blocks)
    if mesh is not None and shards and not is_sharded_already:
        _shard(module, mesh, blocks=blocks, precision=changes.precision)
    if mesh is None:
        return None
    module.trainer.precision_plugin.clip_grad_by_norm = clip_by_norm  # type: ignore[method-assign]
    complete_dtensor(meet_to_read)
    return watch(module)


def reject_lazy_layers(module: nn.Module) -> None:
    """Raise `ConfigError` for layers that get their sizes only from the first batch: no checkpoint fits them before."""
    named_weights = [*module.named_parameters(), *module.named_buffers()]
    if lazy := [name for name, weight in named_weights if is_lazy(weight)]:
        rule = "Layers must have their sizes before training begins, or no checkpoint could be loaded"
        fix = "a layer that is not lazy, such as torch.nn.Linear, or one call of the network in __init__"
        raise ConfigError("model", join_names(lazy), rule, fix)


def _print_blocks(module: L.LightningModule, blocks: Blocks | None, *, is_sharded_already: bool) -> None:
    if not module.trainer.is_global_zero:
        return
    text = f"blocks of the module: {blocks}" if blocks else "the module has no list of equal blocks: it is one block"
    text = "the module is sharded as its configure_model does it" if is_sharded_already else text
    print(f"strategy: {text}", flush=True)


def planned_part(module: L.LightningModule) -> Any:
    """Return the module or its first part with a `tensor_parallel_plan`."""
    for part in module.modules():
        if hasattr(part, "tensor_parallel_plan"):
            return part
    rule = f"must be 1 for {type(module).__name__}: neither it nor a part of it has tensor_parallel_plan()"
    fix = "strategy.tensor_parallel_size=1, or that method in the network (see models/gpt.py)"
    raise ConfigError("strategy.tensor_parallel_size", None, rule, fix)


def _compile(module: L.LightningModule, blocks: Blocks | None) -> None:
    """Compile the blocks, the parts beside them, and a module called `loss`, each by itself."""
    compile_blocks_alone(MAX_COMPILED_VARIANTS)
    compiled: list[nn.Module] = list(blocks.modules) if blocks else []
    inside = {id(part) for block in compiled for part in block.modules()}
    others = [part for part in (blocks.owner if blocks else module).children() if _has_computation(part)]
    compiled += [part for part in others if not any(id(inner) in inside for inner in part.modules())]
    loss = getattr(module, "loss", None)
    for part in [*compiled, *([loss] if isinstance(loss, nn.Module) and loss not in compiled else [])]:
        # Not part.compile(): it leaves torch's own modules, and all that checkpoint() runs, uncompiled.
        part.forward = CompiledForward(part.forward)


class CompiledForward:
    """A compiled method of a module. A copy of the module gets one of its own, not that of the original."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method = method
        # Blocks of other sizes are compiled separately (dynamic=False): one version for all sizes would be slower.
        self.compiled = torch.compile(method, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledForward":
        return CompiledForward(deepcopy(self.method, memo))  # bound to the copy, which `memo` holds


def _has_computation(part: nn.Module) -> bool:
    """Return whether compiling a part helps: an embedding only looks up rows, and a part without weights is small."""
    is_computed = not isinstance(part, nn.Embedding | nn.ModuleList | nn.ModuleDict | Metric)
    return is_computed and next(part.parameters(), None) is not None


def _shard(module: L.LightningModule, mesh: DeviceMesh, *, blocks: Blocks | None, precision: str) -> None:
    """Shard with FSDP2: one group of parameters per block, gathered when the block runs, and one for the rest.

    The rest is gathered for the whole step of a module that Lightning optimizes. A module that optimizes by itself
    changes its parameters within the step, so there each of its parts is gathered when it runs.
    """
    is_mixed = precision == "bf16-mixed"
    policy = MixedPrecisionPolicy()
    if is_mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parameters = dict(module.named_parameters())
    _reject_gradient_hooks(parameters)
    without_dimensions = {parameter for parameter in parameters.values() if parameter.dim() == 0}  # cannot be divided
    shard = partial(fully_shard, mesh=mesh, ignored_params=without_dimensions)
    trained = [block for block in blocks.modules if any(p.requires_grad for p in block.parameters())] if blocks else []
    for block in blocks.modules if blocks else ():
        # The last block stays gathered between forward and backward, which begins with it.
        shard(block, mp_policy=policy, reshard_after_forward=block is not (trained or [None])[-1])
    if not module.automatic_optimization:
        for part in parts_with_parameters(module):
            shard(part, mp_policy=policy, reshard_after_forward=True)
    else:
        # The batch keeps its precision: it may hold targets. Autocast converts what layers get.
        shard(module, mp_policy=replace(policy, cast_forward_inputs=False))
        gather_for_steps(module)


def _reject_gradient_hooks(parameters: dict[str, nn.Parameter]) -> None:
    if names := [name for name, p in parameters.items() if has_gradient_hook(p)]:
        rule = (
            "A parameter must have no hook for its gradient before it is sharded: with strategy=fsdp it is not called"
        )
        fix = "register_post_accumulate_grad_hook in on_fit_start, which gets the shard of all ranks' gradient; or "
        fix += "strategy=ddp, where a hook gets the gradient of its rank's own samples"
        raise ConfigError("model", join_names(names), rule, fix)
