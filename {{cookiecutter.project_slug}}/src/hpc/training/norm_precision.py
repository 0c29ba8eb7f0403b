"""Batch norm whose weights and statistics have different precisions: CPUs have no kernel for it."""

from typing import Any

from lightning.pytorch.accelerators import CPUAccelerator
from torch import nn

from hpc.config.errors import ConfigError

BATCH_NORM = nn.modules.batchnorm._BatchNorm  # the one class that all batch norms share


def reject_mixed_norm_on_cpu(strategy: Any, *, reason: str) -> None:
    """Raise `ConfigError` on CPU.

    Args:
        reason: why weights and statistics have different precisions.
    """
    if isinstance(strategy.accelerator, CPUAccelerator):
        rule = f"On CPU, the weights and statistics of batch norm must have one precision; {reason}"
        fix = "trainer.precision=32-true, or another norm such as torch.nn.GroupNorm"
        raise ConfigError("trainer.precision", strategy.precision_plugin.precision, rule, fix)
