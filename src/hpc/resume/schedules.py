"""Values that schedules set in optimizers, saved apart because not every strategy accepts an optimizer's state."""

import zlib
from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from hpc.config.errors import ConfigError

SCHEDULED_KEYS = ("lr", "weight_decay", "momentum", "betas")  # what schedules and callbacks change while a run goes on


def scheduled_values(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Return these values as plain data: a list of groups for each optimizer."""
    return [
        [{key: _plain(group[key]) for key in SCHEDULED_KEYS if key in group} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def restore(optimizers: Sequence[Optimizer], saved: list[list[dict[str, Any]]]) -> None:
    """Set the result of `scheduled_values`. A new optimizer would take a step with its first learning rate."""
    for optimizer, groups in zip(optimizers, saved, strict=False):
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):  # a captured graph reads the tensor
                    group[key].fill_(value)
                else:
                    group[key] = value


def learning_rate_checksum(optimizers: Sequence[Optimizer]) -> int:
    """Return a checksum of the learning rates, to six digits: processors differ in how they round the last ones."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if "lr" in group]
    rates = [f"{float(group['lr']):.6g}" for group in groups]
    return zlib.crc32(" ".join(rates).encode())


def raise_learning_rate_mismatch(trainer: L.Trainer) -> None:
    """Raise `ConfigError`, on each rank, because the ranks have different learning rates."""
    monitors = [str(config.monitor) for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
    rule = f"All ranks must have the same learning rates, or their weights drift apart. At step {trainer.global_step} "
    rule += "they differ, because a schedule follows a value that each rank has computed from its own samples"
    fix = "call the schedule with the same numbers on each rank"
    if monitors:
        fix = f"sync_dist=True in self.log({monitors[0]!r}, ...), so that the schedule goes by the mean of all ranks"
    raise ConfigError(f"lr_scheduler of {monitors[0]}" if monitors else "lr_scheduler", None, rule, fix)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
