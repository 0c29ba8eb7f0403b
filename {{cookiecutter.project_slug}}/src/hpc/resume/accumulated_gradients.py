"""Gradients that are accumulated by hand and not used yet: they are part of where a run is.

Which of them the module will still use only the module knows, so all that are there are kept.
"""

from collections.abc import Mapping

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def state(module: L.LightningModule) -> dict[str, Tensor]:
    """Return this rank's gradients on the host, sharded ones whole; {} where Lightning makes them zero at each step."""
    if module.automatic_optimization and not is_overridden("optimizer_zero_grad", module):
        return {}  # a run is saved between two steps
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {name: _whole(gradient).detach().to("cpu", copy=True) for name, gradient in gradients.items()}


def restore(module: L.LightningModule, saved: Mapping[str, Tensor]) -> None:
    """Put back what `state` returned, cut as the parameters are now."""
    for name, parameter in module.named_parameters():
        if name in saved:
            parameter.grad = _cut(saved[name].to(parameter.device), parameter)


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _cut(gradient: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    if not isinstance(parameter, DTensor):
        return gradient
    return distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
