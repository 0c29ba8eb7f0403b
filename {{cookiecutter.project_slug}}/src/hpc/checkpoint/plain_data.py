"""What a checkpoint can hold: plain data, so that nothing in it is ever executed. What cannot be held is said early."""

import io
import re
from contextlib import suppress
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from hpc.checkpoint import load_hooks
from hpc.config.errors import ConfigError

FIX = "return numbers, words, tensors, and lists and dicts of them"
PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, torch.Size, torch.dtype, torch.device)


def to_bytes(state: Any) -> bytes:
    """Plain data as torch.save writes it. Raises `ConfigError` where something else than data is in it."""
    content = _saved(state)
    if why := _flaw(content):
        name = next((name for name, part in _parts(state).items() if _flaw(_saved(part))), "callbacks")
        rule = f"a checkpoint must hold plain data only, so that nothing in it is ever executed: {why}"
        raise ConfigError(name, None, rule, FIX)
    return content


def reject_sharded(checkpoint: dict[str, Any]) -> None:
    """Raise `ConfigError` where what rank 0 saves for all ranks holds its part of a tensor."""
    for name, part in _parts(checkpoint).items():
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(part)):
            rule = "a checkpoint must hold whole tensors beside the weights, of which each rank saves its part"
            raise ConfigError(name, None, rule, "tensor.full_tensor(), or an attribute of the module in place of it")


def leave_out_hparams(checkpoint: dict[str, Any]) -> list[str]:
    """Of what `save_hyperparameters()` has noted only plain data stays: the run's config says the rest. Names."""
    left = []
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        values = checkpoint.get(key)
        if isinstance(values, dict):
            left += [name for name, value in values.items() if not is_plain(value)]
            checkpoint[key] = {name: value for name, value in values.items() if is_plain(value)}
        elif key in checkpoint:  # a config of OmegaConf's
            left.append(key)
            del checkpoint[key]
    for kind in ("hparams_type", "datamodule_hparams_type"):
        checkpoint.pop(kind, None)
    return left


def rehearse(trainer: Any, module: L.LightningModule, *without: L.Callback) -> None:
    """Before the first step: what would be saved beside the tensors. Raises `ConfigError`, prints what is left out.

    Args:
        without: callbacks whose own hook is not called.
    """
    checkpoint: dict[str, Any] = {"state_dict": {}}
    with suppress(Exception):  # a hook may ask for what only training makes: it is heard at the first save
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
    checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    checkpoint["callbacks"] = {}
    for callback in trainer.callbacks:
        with suppress(Exception):
            if state := callback.state_dict():
                checkpoint["callbacks"][callback.state_key] = state
            if callback not in without:
                callback.on_save_checkpoint(trainer, module, checkpoint)
    if (left := leave_out_hparams(checkpoint)) and trainer.is_global_zero:
        print(f"warning: hyperparameters that are no plain data are not saved: {', '.join(left)}", flush=True)
    if saved := checkpoint.pop("state_dict", None):
        load_hooks.reject_saved(trainer, saved)
    reject_sharded(checkpoint)
    to_bytes(tree_map_only(Tensor, lambda tensor: torch.empty(0), checkpoint))


def _parts(state: Any) -> dict[str, Any]:
    """What a checkpoint consists of, each part under the name of who made it."""
    state = state if isinstance(state, dict) else {}
    parts = {f"callbacks ({key})": part for key, part in (state.get("callbacks") or {}).items()}
    return parts | {f"on_save_checkpoint or state_dict ({key})": part for key, part in state.items()}


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _flaw(content: bytes) -> str:
    try:
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        return f"it must not hold a {named[1]}" if named else str(error).splitlines()[0]
    return ""


def is_plain(value: Any) -> bool:
    """Can a checkpoint hold it?"""
    if type(value) is dict:
        return all(is_plain(key) and is_plain(one) for key, one in value.items())
    if type(value) in (list, tuple, set):
        return all(map(is_plain, value))
    return type(value) in PLAIN
