"""Hooks of the researcher's that see weights as they are loaded or saved, and may replace them, as in plain Lightning.

Example: a module saves averaged weights as `state_dict`, stores the trained ones separately, and swaps them when it
resumes.
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

REST_FILE = "meta.pt"  # of a checkpoint folder: all but the tensors
KEEPS_WEIGHTS = "must not replace weights in state_dict: the model is sharded, so each rank has only a part of them"
KEEPS_WEIGHTS_FIX = "strategy=single or ddp, or keep the other weights in attributes of the module"


def has_load_hooks(trainer: L.Trainer) -> bool:
    """Return whether the module, or a callback of the researcher's, has a hook that is given what is loaded."""
    owners = (trainer.lightning_module, *researcher_callbacks(trainer))
    return any(is_overridden("on_load_checkpoint", owner) for owner in owners)


def researcher_callbacks(trainer: L.Trainer) -> list[Any]:
    """Return the callbacks that come neither from Lightning nor from this package."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    libraries = ("lightning.", f"{HPC}.")
    return [callback for callback in callbacks if not type(callback).__module__.startswith(libraries)]


def read_weights(module: nn.Module, path: Path) -> dict[str, Any]:
    """Return the entries of `module.state_dict()` as a checkpoint holds them, on the host. Raises `ConfigError`."""
    others = {name: value for name, value in get_model_state_dict(module).items() if not isinstance(value, Tensor)}
    if others:  # the results of `get_extra_state`
        with safe_unpickle.convert_unpickling_errors(path, "resume"):
            load_tensors({"state_dict": others}, storage_reader=safe_unpickle.Reader(path))
    return weights.read(path) | others


def load_trained(module: nn.Module, path: Path) -> dict[str, Any]:
    """Load a checkpoint's weights into a module to be tested or to predict, and return the rest of the checkpoint.

    The module's own `on_load_checkpoint` is called as in plain Lightning, so that it finds what it has saved.

    Raises:
        ConfigError: it is no readable checkpoint, or one of another model.
    """
    weights.saved_tensors(path)  # first, as it says what is wrong with a file
    rest = read_rest(path)
    if not is_overridden("on_load_checkpoint", module) or (path.is_file() and "state_dict" not in rest):
        weights.load(module, path)
        return rest
    checkpoint = rest if path.is_file() else {"state_dict": read_weights(module, path)} | rest
    module.on_load_checkpoint(checkpoint)  # type: ignore[operator]
    load_weights(module, checkpoint["state_dict"])
    return checkpoint


def read_rest(path: Path) -> dict[str, Any]:
    """Return all of a checkpoint but the tensors of a folder; {} where it has nothing else. Raises `ConfigError`."""
    file = path if path.is_file() else path / REST_FILE
    with safe_unpickle.convert_unpickling_errors(path, "ckpt"):
        return safe_unpickle.load_plain(file) if file.is_file() else {}


def load_weights(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load into the module what the hooks have left in `state_dict`. Raises `ConfigError`."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if misfits := weights.describe_misfits(tensors, module):
        rule = f"must fit the weights that on_load_checkpoint leaves in state_dict: {misfits}"
        fix = "the model that the run had, or a hook that adapts the weights"
        raise ConfigError("model", type(module).__name__, rule, fix)
    set_model_state_dict(module, dict(state))


def reject_weights_replaced_on_load(module: nn.Module, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a hook has replaced weights that are sharded.

    Args:
        before: the entries of `state_dict` that the hooks were given.
        after: those that they have left.
    """
    if before.keys() != after.keys() or any(after[name] is not value for name, value in before.items()):
        name = f"on_load_checkpoint of {type(module).__name__}"
        raise ConfigError(name, None, KEEPS_WEIGHTS, KEEPS_WEIGHTS_FIX)


def reject_weights_replaced_on_save(trainer: L.Trainer, saved: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where a hook has replaced weights to be saved, and the model is sharded."""
    strategy: Any = trainer.strategy
    if not strategy.restore_checkpoint_after_setup:
        return
    own = strategy.lightning_module_state_dict()
    if own.keys() != saved.keys() or any(map(_has_other_storage, own.values(), map(saved.get, own))):
        name = f"on_save_checkpoint of {type(trainer.lightning_module).__name__}"
        raise ConfigError(name, None, KEEPS_WEIGHTS, KEEPS_WEIGHTS_FIX)


def _has_other_storage(value: Any, other: Any) -> bool:
    """Return whether a tensor lies elsewhere than another: each `state_dict` makes new tensors of the same memory."""
    if not isinstance(value, Tensor):
        return False
    return not isinstance(other, Tensor) or weights.storage_address(value) != weights.storage_address(other)
