"""Undo what a step has changed: ranks that only compute along count nothing, whatever a module counts in."""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

# Objects of these packages hold no counts, but threads and files; networks and metrics do, and are looked into.
FOREIGN = {*sys.stdlib_module_names, "deepspeed", "hpc", "lightning", "lightning_fabric", "mlflow", "numpy"}
FOREIGN |= {"pytorch_lightning", "rich", "tensorboard", "torch", "tqdm", "wandb"}
MAX_LISTED_BYTES = 1 << 20  # a larger tensor in a list is an output that was gathered: it is not changed in place


@contextmanager
def without_trace(*roots: Any) -> Iterator[None]:
    """Restore, after the block, what these objects hold: numbers, containers, arrays, buffers, states of metrics.

    Parameters are left alone: an evaluation does not change them, and a sharded network gathers them.
    """
    undo = _remember(roots)
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in undo:
                restore()


@contextmanager
def logged_without_weight(module: Any) -> Iterator[None]:
    """Let `self.log` count no sample: a rank without one logs the same names as the others at a step of training."""

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        is_sum = kwargs.get("reduce_fx") in ("sum", torch.sum)
        own_log(
            name, torch.zeros_like(torch.as_tensor(value)) if is_sum else value, *args, **kwargs | {"batch_size": 0}
        )

    own_log = module.log
    with patch.object(module, "log", log):  # log_dict calls it
        yield


def _remember(roots: tuple[Any, ...]) -> list[Callable[[], object]]:
    """Return functions that restore the content of objects, and of what they hold."""
    undo: list[Callable[[], object]] = []
    to_visit, seen = [(root, False) for root in roots], dict[int, Any]()
    while to_visit:
        value, is_listed = to_visit.pop()
        if id(value) in seen or isinstance(value, int | float | str | bytes | type | None | nn.Parameter | DTensor):
            continue
        seen[id(value)] = value
        inner: list[Any] = []
        if isinstance(value, Tensor | np.ndarray):
            undo += [_undo_array(value)] if value.nbytes <= MAX_LISTED_BYTES or not is_listed else []
        elif isinstance(value, dict):
            undo.append(partial(_restore_dict, value, dict(value)))
            inner = list(value.values())
        elif isinstance(value, list | deque | set):
            inner = list(value)
            undo.append(partial(_restore_items, value, inner))
        elif isinstance(value, tuple):
            inner = list(value)
        elif isinstance(value, nn.Module | SimpleNamespace) or _is_own(value):
            undo.append(partial(_restore_dict, vars(value), dict(vars(value))))
            inner = [held for name, held in vars(value).items() if name != "_parameters"]
        to_visit += [(item, isinstance(value, list | deque | tuple)) for item in inner]
    return undo


def _is_own(value: Any) -> bool:
    """Return whether an object may be the researcher's own, such as a meter, or one that a step counts in."""
    is_foreign = type(value).__module__.partition(".")[0] in FOREIGN
    return hasattr(value, "__dict__") and not is_foreign and not isinstance(value, Dataset)


def _undo_array(value: Any) -> Callable[[], object]:
    """Return a function that restores the numbers of a tensor or array in place, if they have changed.

    An expanded tensor, which has one number in many places, cannot be copied to, but neither be changed in place.
    """
    if isinstance(value, np.ndarray):
        before = value.copy()
        return lambda: np.copyto(value, before) if value.flags.writeable else None
    if value.layout != torch.strided:
        return lambda: None
    numbers = value.detach().clone()
    return lambda: None if torch.equal(value, numbers) else value.copy_(numbers)


def _restore_dict(value: dict[Any, Any], content: dict[Any, Any]) -> None:
    if value.keys() != content.keys() or any(value[key] is not item for key, item in content.items()):
        dict.clear(value)
        dict.update(value, content)


def _restore_items(value: Any, items: list[Any]) -> None:
    if len(value) != len(items) or any(now is not item for now, item in zip(value, items, strict=True)):
        value.clear()
        value.update(items) if isinstance(value, set) else value.extend(items)
