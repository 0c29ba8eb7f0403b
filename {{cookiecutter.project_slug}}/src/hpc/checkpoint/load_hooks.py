"""Weights that a researcher's hooks see as they are loaded, and may replace, as plain Lightning lets them.

A module may save its average as `state_dict`, say, and what it trains beside it, and change them back when it goes on.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from hpc.checkpoint import safe_unpickle, weights
from hpc.config.errors import ConfigError
from hpc.config.project import HPC

MUST = "must leave the weights in state_dict as they are, as each rank has a part of them only"
WHOLE = "strategy=single or ddp, or weights that the module keeps in attributes"


def are_seen(trainer: L.Trainer) -> bool:
    """Has the module a hook that is given what is loaded, or a callback that the researcher brings?"""
    return any(is_overridden("on_load_checkpoint", one) for one in (trainer.lightning_module, *own_callbacks(trainer)))


def own_callbacks(trainer: L.Trainer) -> list[Any]:
    """Return those that neither Lightning nor this project has."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    libraries = ("lightning.", f"{HPC}.")
    return [callback for callback in callbacks if not type(callback).__module__.startswith(libraries)]


def read(module: nn.Module, path: Path) -> dict[str, Any]:
    """Return the weights of a checkpoint as they are in it, on the host. Raises `ConfigError`."""
    others = {name: value for name, value in get_model_state_dict(module).items() if not isinstance(value, Tensor)}
    if others:  # what `get_extra_state` returns
        with safe_unpickle.rejections(path, "resume"):
            load_tensors({"state_dict": others}, storage_reader=safe_unpickle.Reader(path))
    return weights.read(path) | others


def load(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what the hooks have left. Raises `ConfigError`."""
    if misfits := weights.misfits({name: one for name, one in state.items() if isinstance(one, Tensor)}, module):
        rule = f"on_load_checkpoint must leave weights in state_dict that fit the model: {misfits}"
        raise ConfigError(
            "model", type(module).__name__, rule, "the model that the run had, or a hook that adapts them"
        )
    set_model_state_dict(module, dict(state))


def reject_loaded(module: nn.Module, given: Mapping[str, Any], left: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a hook has replaced weights that are sharded."""
    if given.keys() != left.keys() or any(left[name] is not value for name, value in given.items()):
        raise ConfigError("model", type(module).__name__, f"on_load_checkpoint {MUST}", WHOLE)


def reject_saved(trainer: L.Trainer, saved: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a hook would save others than the module's weights, and these are sharded."""
    strategy: Any = trainer.strategy
    if not strategy.restore_checkpoint_after_setup:
        return
    own = strategy.lightning_module_state_dict()
    if own.keys() != saved.keys() or any(map(_differ, own.values(), map(saved.get, own))):
        raise ConfigError("model", type(trainer.lightning_module).__name__, f"on_save_checkpoint {MUST}", WHOLE)


def _differ(one: Any, other: Any) -> bool:
    """Do tensors lie in different places? Each `state_dict` makes new ones of the same memory."""
    return isinstance(one, Tensor) and not (
        isinstance(other, Tensor) and weights.storage(one) == weights.storage(other)
    )
