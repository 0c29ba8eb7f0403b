"""Apply hyperparameters that a person changed between two attempts of a run.

A checkpoint restores an optimizer with its old learning rate. So the first values of optimizers and schedules, as the
config made them, are saved, too: where the config makes other ones now, those count. The same holds for schedules that
are made for the length of training, if that has changed.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import lightning as L
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from hpc.config.conversion import flatten
from hpc.config.errors import ConfigError
from hpc.config.freezing import to_frozen_yaml


class HyperparameterUpdater(L.Callback):
    """Apply changed values of the model's config. It must come after the callback that restores the optimizers."""

    def __init__(self, model: DictConfig) -> None:
        values = flatten(OmegaConf.create(to_frozen_yaml(model)))
        self.config = {key: str(value) for key, value in values.items()}
        self.initial_values: list[Any] = []  # of optimizers and schedules, as the config makes them now
        self.length: list[int | None] = []  # epochs and steps of the training
        self.saved: dict[str, Any] = {}
        self.callback_arguments: list[tuple[L.Callback, dict[str, Any]]] = []

    @property
    def state_key(self) -> str:
        return "Hyperparameters"  # the key in the checkpoint; not the class's name, which may change

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # Before a checkpoint restores callbacks: EarlyStopping would have its old patience again.
        self.callback_arguments = [(callback, _saved_arguments(callback)) for callback in _lightning_callbacks(trainer)]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Before a checkpoint restores them.
        self.initial_values = [[_plain_values(owner) for owner in owners] for owners in _value_owners(trainer)]
        self.length = [trainer.max_epochs, trainer.max_steps]

    def state_dict(self) -> dict[str, Any]:
        return {"config": self.config, "made": self.initial_values, "length": self.length}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback, values in self.callback_arguments:
            vars(callback).update(values)
        if not self.saved:
            return
        before, now = self.saved["made"], self.initial_values
        if self.saved["config"] != self.config:
            reason = "changed, as resume_allow permits:"
            _apply(trainer, _value_owners(trainer), before=before, now=now, reason=reason)
        elif self.saved["length"] != self.length:  # a change of the code alone changes no value
            reason = "changed, as the length of training has changed:"
            _apply(trainer, [_schedules(trainer)], before=before[-1:], now=now[-1:], reason=reason)


def _apply(
    trainer: L.Trainer, owners_by_part: list[list[Any]], *, before: list[Any], now: list[Any], reason: str
) -> None:
    """Set the values that differ between `before` and `now`, and print them.

    Args:
        owners_by_part: groups of each optimizer, and schedules; `before` and `now` have their values.

    Raises:
        ConfigError: there are more or fewer groups than before.
    """
    lines: list[str] = []
    if list(map(len, before)) != list(map(len, now)):
        rule = "Optimizers must have as many parameter groups as before, if values of the model are to change"
        raise ConfigError(
            "resume_allow", None, rule, "resume first with the old values and the new layout, then with the new values"
        )
    for owners, values_before, values_now in zip(owners_by_part, before, now, strict=True):
        for number, (owner, old, new) in enumerate(zip(owners, values_before, values_now, strict=False)):
            lines += [f"{type(owner).__name__} {number}: {line}" for line in _set_changed(owner, old=old, new=new)]
    for schedule in _schedules(trainer) if lines else ():
        schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]
    if lines and trainer.is_global_zero:
        print("\n".join([reason, *lines]), flush=True)


def _lightning_callbacks(trainer: Any) -> list[L.Callback]:
    return [callback for callback in trainer.callbacks if type(callback).__module__.startswith("lightning.")]


def _saved_arguments(callback: L.Callback) -> dict[str, Any]:
    """Return the constructor's arguments that the callback saves in its state."""
    names = callback.state_dict().keys() & inspect.signature(type(callback)).parameters.keys()
    return {name: vars(callback)[name] for name in names if name in vars(callback)}


def _value_owners(trainer: Any) -> list[list[Any]]:
    """Return the groups of each optimizer, and all schedules."""
    return [*(list(optimizer.param_groups) for optimizer in trainer.optimizers), _schedules(trainer)]


def _schedules(trainer: Any) -> list[Any]:
    """Return all schedules, also those within others, such as SequentialLR."""

    def walk(schedule: Any) -> Iterator[Any]:
        yield schedule
        for inner in getattr(schedule, "_schedulers", ()):
            yield from walk(inner)

    return [schedule for config in trainer.lr_scheduler_configs for schedule in walk(config.scheduler)]


def _values(owner: Any) -> dict[str, Any]:
    return owner if isinstance(owner, dict) else vars(owner)


def _plain_values(owner: Any) -> dict[str, Any]:
    """Return the numbers of a group or a schedule."""
    values = {key: _to_number(value) for key, value in _values(owner).items() if key != "params"}
    return {key: value for key, value in values.items() if value is not None}


def _to_number(value: Any) -> Any:
    """Return a number, a list of numbers, or a dictionary of numbers and texts; None for anything else."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        numbers = [_to_number(item) for item in value]
        return None if None in numbers else numbers
    if isinstance(value, dict):  # a phase of OneCycleLR, for example
        content = {key: item if isinstance(item, str) else _to_number(item) for key, item in value.items()}
        return None if None in content.values() else content
    return value if isinstance(value, bool | int | float) else None


def _set_changed(owner: Any, *, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Set the values that differ, and return a line on each.

    A learning rate that a schedule has changed keeps its proportion to the first one.
    """
    values, lines = _values(owner), []
    for key, value in new.items():
        if key == "_last_lr" or old.get(key) == value:
            continue
        target: Any = value
        if key == "lr" and old.get(key):
            target = float(values[key]) * value / old[key]
        lines.append(f"{key} {values.get(key)} -> {target}")
        if isinstance(values.get(key), Tensor):  # a captured graph reads the tensor
            values[key].fill_(target)
        else:
            values[key] = tuple(target) if isinstance(values.get(key), tuple) else target
    return lines
