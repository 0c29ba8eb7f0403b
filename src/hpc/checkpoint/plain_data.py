"""Plain data, all that a checkpoint can hold, so that nothing in it is ever executed. All else is rejected early."""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from traceback import walk_tb
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hpc.checkpoint import load_hooks, safe_unpickle
from hpc.config import freezing
from hpc.config.errors import ConfigError, first_line

FIX = "return numbers, strings, tensors, arrays, and lists and dicts of them"
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, Tensor, torch.Size, torch.dtype, torch.device)


def to_bytes(state: Any) -> bytes:
    """Return plain data as torch.save writes it. Raises `ConfigError` where anything else is in it."""
    content, flaw = _save(state)
    if flaw:
        name = next((name for name, part in _parts_by_origin(state).items() if _save(part)[1]), "callbacks")
        rule = f"must put only plain data into a checkpoint, so that nothing in it is ever executed: {flaw}"
        raise ConfigError(name, None, rule, FIX)
    return content


def reject_sharded_tensors(checkpoint: dict[str, Any]) -> None:
    """Raise `ConfigError` where the part of a checkpoint that rank 0 saves for all ranks holds a sharded tensor."""
    for name, part in _parts_by_origin(checkpoint).items():
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(part)):
            rule = "must put whole tensors into a checkpoint: of a sharded one, rank 0 would save its own part only"
            raise ConfigError(name, None, rule, "tensor.full_tensor(), or an attribute of the module instead")


def make_hparams_savable(checkpoint: dict[str, Any], references: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Remove hyperparameters that are no plain data, and return their names: the run's config holds them anyway.

    Args:
        references: of values of the environment, which may be secrets; see `freezing.with_references`.
    """
    removed = []
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        if key in checkpoint:
            values = freezing.with_references(checkpoint[key], references)
            removed += [name for name, value in values.items() if not is_plain(value)]
            checkpoint[key] = {name: value for name, value in values.items() if is_plain(value)}
    for kind in ("hparams_type", "datamodule_hparams_type"):
        checkpoint.pop(kind, None)
    return removed


def rehearse_save(trainer: Any, module: L.LightningModule, *without: L.Callback) -> None:
    """Check before the first step what would be saved beside the tensors, and print what would be left out.

    Args:
        without: callbacks whose own hook is not called.

    Raises:
        ConfigError: something that is no plain data would be saved.
    """
    checkpoint: dict[str, Any] = {"state_dict": {}}
    with suppress(Exception):  # a hook may need what only training makes: its error comes at the first save
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
    checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    checkpoint["callbacks"] = {}
    for callback in trainer.callbacks:
        try:
            if state := callback.state_dict():
                checkpoint["callbacks"][callback.state_key] = state
            if callback not in without:
                callback.on_save_checkpoint(trainer, module, checkpoint)
        except Exception as error:
            if trainer.is_global_zero:
                text = f"the state of {type(callback).__name__} cannot be saved before the first step"
                print(f"warning: {text}: {type(error).__name__}: {first_line(error)}", flush=True)
    if (removed := make_hparams_savable(checkpoint)) and trainer.is_global_zero:
        print(f"warning: hyperparameters that are no plain data are not saved: {', '.join(removed)}", flush=True)
    if weights := checkpoint.pop("state_dict", None):
        load_hooks.reject_weights_replaced_on_save(trainer, weights)
    reject_sharded_tensors(checkpoint)
    to_bytes(tree_map_only(Tensor, lambda tensor: torch.empty(0), checkpoint))


def raise_config_error_for_callback(error: Exception, callbacks: Sequence[L.Callback]) -> None:
    """Raise `ConfigError` if a hook of a researcher's callback has failed while a checkpoint was made; else return."""
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        callback = next((one for one in callbacks if one is frame.f_locals.get("self")), None)
        if callback is not None and not type(callback).__module__.startswith("hpc."):
            place = f"{frame.f_code.co_filename}, line {line}"
            rule = f"must return its state; {frame.f_code.co_name} has raised {type(error).__name__}: "
            raise ConfigError(f"callbacks ({callback.state_key})", None, f"{rule}{first_line(error)} ({place})", FIX)


def is_plain(value: Any) -> bool:
    """Return whether a checkpoint can hold a value."""
    if type(value) is dict:
        return all(is_plain(key) and is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    return type(value) in PLAIN_TYPES


def _parts_by_origin(state: Any) -> dict[str, Any]:
    """Return the parts of a checkpoint, each under the name of what made it."""
    state = state if isinstance(state, dict) else {}
    parts = {f"callbacks ({key})": part for key, part in (state.get("callbacks") or {}).items()}
    return parts | {f"on_save_checkpoint or state_dict ({key})": part for key, part in state.items()}


def _save(value: Any) -> tuple[bytes, str]:
    """Return a value as torch.save writes it, and why it cannot be saved and read as plain data ("" if it can)."""
    stream = io.BytesIO()
    try:
        torch.save(tree_map_only((DictConfig, ListConfig), OmegaConf.to_container, value), stream)
        stream.seek(0)
        safe_unpickle.load_saved(stream)
    except Exception as error:  # a class of the value may raise any
        kind = re.search(r"GLOBAL ([\w.]+)", str(error))
        return b"", f"it must not hold a {kind[1]}" if kind else first_line(error)
    return stream.getvalue(), ""
