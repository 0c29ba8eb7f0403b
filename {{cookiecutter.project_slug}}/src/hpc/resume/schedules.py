"""What schedules set in the optimizers, kept beside the optimizers' own states, which do not go to every strategy."""

import zlib
from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from hpc.config.errors import ConfigError

SCHEDULED = ("lr", "weight_decay", "momentum", "betas")  # what schedules and callbacks change while a run goes on


def scheduled_values(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
    """Of each group of each optimizer, as plain data."""
    return [
        [{key: _plain(group[key]) for key in SCHEDULED if key in group} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def restore(optimizers: Sequence[Optimizer], saved: list[list[dict[str, Any]]]) -> None:
    """Set what `scheduled` returned. An optimizer that begins anew would take a step with its first learning rate."""
    for optimizer, groups in zip(optimizers, saved, strict=False):
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            for key, value in values.items():
                if isinstance(group.get(key), Tensor):  # a captured graph reads it there
                    group[key].fill_(value)
                else:
                    group[key] = value


def learning_rate_checksum(optimizers: Sequence[Optimizer]) -> int:
    """Of the learning rates; to six digits, as processors round the last ones otherwise."""
    rates = [f"{float(group['lr']):.6g}" for one in optimizers for group in one.param_groups if "lr" in group]
    return zlib.crc32(" ".join(rates).encode())


def reject_differing_rates(trainer: L.Trainer) -> None:
    """Of ranks whose learning rates are not the same. Raises `ConfigError`, on each of them."""
    monitors = [str(one.monitor) for one in trainer.lr_scheduler_configs if one.reduce_on_plateau]
    rule = f"all ranks must have the same learning rates, or their weights drift apart; at step {trainer.global_step} "
    rule += "they differ: a schedule has gone by what each rank has seen of its own samples"
    fix = "let each rank call a schedule with the same numbers"
    if monitors:
        fix = f"sync_dist=True in self.log({monitors[0]!r}, ...), so that the schedule goes by the mean of all ranks"
    raise ConfigError(f"lr_scheduler of {monitors[0]}" if monitors else "lr_scheduler", None, rule, fix)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
