"""The norm of the last step's gradients, as whoever clips them has left it."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from hpc.state.holder_fields import GRADIENT_NORM


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
