"""Find NaN or infinite losses and gradients without waiting for the device at every step."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from hpc.strategies.gradients import last_gradient_norm


class NonFiniteCheck:
    """Find losses and gradient norms of this rank that are NaN or infinite, between two calls of `compute_and_reset`.

    Args:
        is_skipping: `faults.nonfinite=skip`: the optimizers leave such steps out, and nothing is reported.
    """

    def __init__(self, *, is_skipping: bool) -> None:
        self.is_skipping = is_skipping
        self._is_seen: Tensor | None = None  # a boolean on the device; None: no loss since the last reset

    def update(self, outputs: Any) -> None:
        """Check what `training_step` has returned; it may be nothing, or have no loss."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if isinstance(loss, Tensor) and not self.is_skipping:
            is_bad = ~torch.isfinite(loss).all() if loss.ndim else ~torch.isfinite(loss)
            self._is_seen = is_bad if self._is_seen is None else self._is_seen | is_bad

    def compute_and_reset(self, trainer: L.Trainer, module: L.LightningModule) -> bool:
        """Return whether a loss or the norm was not finite, and reset. Waits for the device."""
        is_seen, self._is_seen = self._is_seen, None
        norm = None if self.is_skipping else last_gradient_norm(module)
        is_scaled = trainer.precision == "16-mixed"  # there a norm is often infinite, and the scaler skips that step
        return bool(is_seen) or (norm is not None and not is_scaled and not bool(torch.isfinite(norm)))
