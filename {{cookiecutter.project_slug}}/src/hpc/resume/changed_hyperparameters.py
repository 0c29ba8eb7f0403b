"""Learning rates and the like that were changed in the config of a run that goes on.

A checkpoint restores an optimizer as it was, with its old learning rate. So what the config made of optimizers and
schedules at first is kept, too: where it makes something else of them now, that counts. So it does for schedules that
are made for the length of a training which has become another.
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

OURS = "parallelize"  # of the model's section, what the strategy decides


class Hyperparameters(L.Callback):
    """Lets changed values of the model's config take effect. Must come after what restores the optimizers."""

    def __init__(self, model: DictConfig) -> None:
        values = flatten(OmegaConf.create(to_frozen_yaml(model)))
        self.config = {key: str(value) for key, value in values.items() if key.split(".")[0] != OURS}
        self.made: list[Any] = []
        self.length: list[int | None] = []
        self.before: dict[str, Any] = {}
        self.arguments: list[tuple[L.Callback, dict[str, Any]]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Before a checkpoint restores callbacks: EarlyStopping would have its old patience again."""
        self.arguments = [(one, _arguments(one)) for one in _of_lightning(trainer)]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Before a checkpoint restores them."""
        self.made = [[_plain(one) for one in part] for part in _parts(trainer)]
        self.length = [trainer.max_epochs, trainer.max_steps]

    def state_dict(self) -> dict[str, Any]:
        return {"config": self.config, "made": self.made, "length": self.length}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for callback, values in self.arguments:
            vars(callback).update(values)
        before = self.before
        if not before:
            return
        if before["config"] != self.config:
            self._change(trainer, "changed, as resume_allow permits:", _parts(trainer), before["made"], self.made)
        elif before["length"] != self.length:  # an edit of code alone changes nothing
            made = before["made"][-1:], self.made[-1:]
            self._change(trainer, "changed, as training is now of another length:", [_schedules(trainer)], *made)

    def _change(self, trainer: L.Trainer, why: str, parts: list[list[Any]], before: list[Any], made: list[Any]) -> None:
        lines: list[str] = []
        if list(map(len, before)) != list(map(len, made)):
            rule = "optimizers must have as many groups of parameters as before, if values of the model are to change"
            raise ConfigError("resume_allow", None, rule, "one resume for the other layout, then one for the values")
        for part, was, now in zip(parts, before, made, strict=True):
            for number, (one, old, new) in enumerate(zip(part, was, now, strict=False)):
                lines += [f"{type(one).__name__} {number}: {line}" for line in _change(one, old, new)]
        for schedule in _schedules(trainer) if lines else ():
            schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]
        if lines and trainer.is_global_zero:
            print("\n".join([why, *lines]), flush=True)


def _of_lightning(trainer: Any) -> list[L.Callback]:
    return [one for one in trainer.callbacks if type(one).__module__.startswith("lightning.")]


def _arguments(callback: L.Callback) -> dict[str, Any]:
    """Those that it was made with and saves all the same."""
    saved = callback.state_dict().keys() & inspect.signature(type(callback)).parameters.keys()
    return {name: vars(callback)[name] for name in saved if name in vars(callback)}


def _parts(trainer: Any) -> list[list[Any]]:
    """The groups of each optimizer, and all schedules."""
    return [*(list(optimizer.param_groups) for optimizer in trainer.optimizers), _schedules(trainer)]


def _schedules(trainer: Any) -> list[Any]:
    """Also those that others, such as SequentialLR, are made of."""

    def each(schedule: Any) -> Iterator[Any]:
        yield schedule
        for inner in getattr(schedule, "_schedulers", ()):
            yield from each(inner)

    return [one for config in trainer.lr_scheduler_configs for one in each(config.scheduler)]


def _values(one: Any) -> dict[str, Any]:
    return one if isinstance(one, dict) else vars(one)


def _plain(one: Any) -> dict[str, Any]:
    """Numbers of a group or a schedule."""
    values = {key: _number(value) for key, value in _values(one).items() if key != "params"}
    return {key: value for key, value in values.items() if value is not None}


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        numbers = [_number(one) for one in value]
        return None if None in numbers else numbers
    if isinstance(value, dict):  # a phase of OneCycleLR, say
        content = {key: one if isinstance(one, str) else _number(one) for key, one in value.items()}
        return None if None in content.values() else content
    return value if isinstance(value, bool | int | float) else None


def _change(one: Any, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Set what differs. What a schedule has made of a learning rate keeps its proportion to the first one."""
    values, lines = _values(one), []
    for key, value in new.items():
        if key == "_last_lr" or old.get(key) == value:
            continue
        target: Any = value
        if key == "lr" and old.get(key):
            target = float(values[key]) * value / old[key]
        lines.append(f"{key} {values.get(key)} -> {target}")
        if isinstance(values.get(key), Tensor):  # a captured graph reads it there
            values[key].fill_(target)
        else:
            values[key] = tuple(target) if isinstance(values.get(key), tuple) else target
    return lines
