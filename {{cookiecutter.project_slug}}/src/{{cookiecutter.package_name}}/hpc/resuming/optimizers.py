"""What schedules set in the optimizers, kept beside the optimizers' own states, which do not go to every strategy."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

SCHEDULED = ("lr", "weight_decay", "momentum", "betas")  # what schedules and callbacks change while a run goes on


def scheduled(optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
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


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
