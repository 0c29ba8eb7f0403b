"""Gradients that a module accumulates by itself over several steps are part of a run's state.

Only the module knows which of them it will still use, so all gradients are saved.
"""

from collections.abc import Mapping

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def state(module: L.LightningModule) -> dict[str, Tensor]:
    """Return this rank's gradients on the host, gathered if sharded; {} if Lightning zeroes them at each step."""
    if module.automatic_optimization and not is_overridden("optimizer_zero_grad", module):
        return {}  # a run is saved between two steps
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {name: _gather(gradient).detach().to("cpu", copy=True) for name, gradient in gradients.items()}


def restore(module: L.LightningModule, saved: Mapping[str, Tensor]) -> None:
    """Restore the result of `state`, sharded as the parameters are now."""
    for name, parameter in module.named_parameters():
        if name in saved:
            parameter.grad = _shard_like(saved[name].to(parameter.device), parameter)


def _gather(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _shard_like(gradient: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return gradient
    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
