"""Set attributes from a checkpoint: those that training could have changed, never what the config gave.

Whoever can write a checkpoint can put any entry into it. Numbers of one are believed, as its weights are. But a folder,
a file or a command that a constructor was given stays what the config says.
"""

import inspect
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from hpc.config.errors import ConfigError
from hpc.config.project import HPC
from hpc.state import plain_forms, randomness

RECORDS = (dict, list, set, deque, SimpleNamespace)  # if one was given, all that it holds was given


def set_attribute(
    owner: Any, name: str, form: Any, *, find: plain_forms.Find | None = None, device: Any = "cpu"
) -> None:
    """Set an attribute to the value of a plain form; an object of the same kind is filled, as others may refer to it.

    Args:
        find: returns an object of this run by its name.
        device: of this rank.

    Raises:
        LookupError: a class or an object is missing.
        ConfigError: training cannot have given it this value.
    """
    present = getattr(owner, name, None)
    value = plain_forms.value_of(form, present, find=find, device=device)
    if not is_restorable(owner, name, value):
        kind = type(owner).__name__
        rule = f"A checkpoint must not set {name} of a {kind}, which training cannot change or which the config gives"
        raise ConfigError("resume", f"{kind}.{name}", rule, "a run whose checkpoints nobody has edited")
    fill = FILLERS.get(type(present))
    can_fill = fill and type(value) in (type(present), Tensor) and _layout(present) == _layout(value)
    with suppress(RuntimeError, ValueError):  # one that cannot be written to, or only as a whole
        if fill and can_fill and value is not present:
            fill(present, value)
            return
    if value is not present:
        setattr(owner, name, value)


def fill_container(present: Any, content: Any) -> None:
    """Let a container hold this content alone."""
    present.clear()
    (present.extend if isinstance(present, list | deque) else present.update)(content)


def is_restorable(owner: Any, name: str, value: Any) -> bool:
    """Return whether a checkpoint may set this attribute to this value."""
    of_class = inspect.getattr_static(type(owner), name, None)
    if name.startswith("__") or isinstance(of_class, property) or callable(of_class):
        return False
    if not is_given(owner, name):
        return True
    giver = _class_with_argument(owner, name)
    is_of_library = giver is not None and giver.__module__.startswith(f"{HPC}.")  # whose arguments never change
    return not is_of_library and has_only_given_texts(value, getattr(owner, name, None))


def is_given(owner: Any, name: str) -> bool:
    """Return whether an attribute holds what the constructor, or `save_hyperparameters`, was given."""
    return name.startswith("_hparams") or _class_with_argument(owner, name) is not None


def has_only_given_texts(value: Any, present: Any) -> bool:
    """Return whether all texts in a value are in the present one, too: files in another order, say, or some of them."""
    if _is_text(present):
        return type(value) is type(present) and value == present
    return set(_texts(value)) <= set(_texts(present))


def _class_with_argument(owner: Any, name: str) -> type | None:
    return next((kind for kind in type(owner).__mro__ if name in _arguments(kind)), None)


@cache
def _arguments(kind: type) -> frozenset[str]:
    """Return the names of the arguments of a class's own constructor."""
    try:
        return frozenset(inspect.signature(vars(kind)["__init__"]).parameters)
    except (KeyError, TypeError, ValueError):  # none of its own, or one in C
        return frozenset()


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes | PurePath) and not isinstance(value, Enum)


def _texts(value: Any) -> Iterator[Any]:
    """Yield all texts in a value, also the keys of dicts."""
    if _is_text(value):
        yield value
    elif isinstance(value, dict | SimpleNamespace):
        entries = value if isinstance(value, dict) else vars(value)
        yield from _texts([*entries, *entries.values()])
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for entry in value:
            yield from _texts(entry)


def _layout(value: Any) -> Any:
    """Return what two tensors or arrays must share for one to be copied into the other; None for other values."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.is_leaf, value.is_inference()
    return (value.shape, value.dtype) if isinstance(value, np.ndarray) else None


FILLERS: dict[type, Callable[[Any, Any], object]] = {
    Tensor: lambda present, value: present.data.copy_(value),
    nn.Parameter: lambda present, value: present.data.copy_(value),
    np.ndarray: np.copyto,
    **dict.fromkeys((list, deque, set, dict, Counter, OrderedDict, defaultdict), fill_container),
    **dict.fromkeys(
        plain_forms.GENERATORS, lambda present, value: randomness.set_state(present, randomness.get_state(value))
    ),
}
