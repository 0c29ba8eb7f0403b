"""Clip gradients and group parameters, also where they are sharded."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from hpc.config.errors import ConfigError
from hpc.config.rules import SKIPPING_NEEDS_FUSED
from hpc.logging.gradient_norm import deepspeed_norm
from hpc.state.holder_fields import GRADIENT_NORM, SKIPS_NOT_FINITE


def clip_gradients(module: L.LightningModule, optimizer: Optimizer, clip_val: float | None) -> Tensor:
    """Scale all gradients down to the global norm `clip_val` if theirs is larger, and return their norm, a scalar.

    With `trainer.gradient_clip_algorithm=value` each number is clipped to [-clip_val, clip_val] instead. Under
    `faults.nonfinite=skip` the optimizers leave out a step whose norm is NaN or infinite. DeepSpeed clips its gradients
    itself, to `trainer.gradient_clip_val`; there the norm of the step before is returned.
    """
    if (norm := deepspeed_norm(module)) is not None:
        return norm
    groups = _group_by_mesh(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
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


def clip_by_norm(optimizer: Optimizer, clip_val: float) -> None:
    """Scale an optimizer's gradients down to a norm, as Lightning does, also where some are sharded and some whole."""
    groups = _group_by_mesh(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    norms = [_gather(get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    for group in groups if clip_val > 0 else ():
        clip_grads_with_norm_(group, clip_val, torch.stack(norms).norm())


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


def _group_by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by device mesh. Kernels for many tensors need one mesh; tensor parallelism brings several."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups[mesh].append(parameter)
    return list(groups.values())


def _gather(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
