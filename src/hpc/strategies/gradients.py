"""Gradients: averaged over the ranks before anything reads them, and clipped, also where they are sharded."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import LBFGS, Optimizer

from hpc.config.errors import ConfigError
from hpc.config.rules import SKIPPING_NEEDS_FUSED
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


def last_gradient_norm(module: L.LightningModule) -> Tensor | None:
    """Return the gradient norm of the last step, a scalar; None before the first, or if the module clips by itself."""
    norm = deepspeed_norm(module)
    return getattr(module, GRADIENT_NORM, None) if norm is None else norm


def deepspeed_norm(module: L.LightningModule) -> Tensor | None:
    """Return the gradient norm that DeepSpeed reports for its last step; None under another strategy."""
    engine: Any = module.trainer.model
    if not hasattr(engine, "get_global_grad_norm"):
        return None
    return torch.as_tensor(engine.get_global_grad_norm() or 0.0, device=module.device)


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


class CompletesGradients:
    """Mixin for a strategy of several ranks that averages by itself the gradients which DDP or FSDP leaves alone.

    Lightning calls `on_after_backward` before the strategy's own `post_backward`, and there people look at gradients,
    or change them.
    """

    lightning_module: Any
    precision_plugin: Any
    share: float

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Do the same as in Lightning, but let the hooks after backward find the gradients of all ranks."""
        module, precision = self.lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)  # type: ignore[attr-defined]
        closure_loss = precision.pre_backward(closure_loss, module)
        precision.backward(closure_loss, module, optimizer, *args, **kwargs)
        self.complete_gradients()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)  # type: ignore[attr-defined]
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Give an optimizer that decides by the loss how far to go that of all ranks, so that all go equally far."""

        def mean_loss() -> Any:
            loss = closure()
            if loss is None:
                return None
            tensor = torch.as_tensor(loss, device=self.lightning_module.device).detach()  # it may be a number
            return self.reduce(tensor * self.share)  # type: ignore[attr-defined]

        reads_loss = isinstance(optimizer, LBFGS)
        return super().optimizer_step(optimizer, mean_loss if reads_loss else closure, *args, **kwargs)  # type: ignore[misc]

    def complete_gradients(self) -> None:
        """Average over the ranks what nothing else has averaged. Called on all ranks after each backward."""
