"""Plain data for values that a checkpoint cannot hold as they are.

These are numpy's arrays and numbers, the containers of `collections`, iterators over containers, random number
generators, members of an Enum, and references to objects of the run.
"""

import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import count, cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hpc.checkpoint.plain_data import PLAIN_TYPES, is_plain
from hpc.config.errors import ConfigError
from hpc.state import randomness, restorable
from hpc.state.checksums import NameLookup

KIND, NOT_KEPT, NOT_SEEN = "of kind", "not kept", "not seen"
ON_DEVICE = "on device"  # kind of a tensor of the rank's device: saved on the host, and moved back there
FACTORIES = {factory.__name__: factory for factory in (int, float, list, dict, set, str)}
BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
IMMUTABLE_TYPES = {kind for kind in PLAIN_TYPES if kind is not Tensor}
CONTAINERS = (dict, list, tuple, set, deque, Counter, OrderedDict, defaultdict)
# The maker of each kind of iterator; those of Python have a kind for each container.
ITERATORS: dict[type, Callable[..., Any]] = {type(iter(empty)): iter for empty in ([], (), range(0))}
ITERATORS |= {kind: kind for kind in (enumerate, zip, count, cycle)}
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
Find = Callable[[str], Any]  # an object by its name; raises `LookupError`


def may_have_plain_form(value: Any) -> bool:
    """Return whether a value is of a kind that may have a plain form; its content decides whether it has one."""
    return type(value) in (*PLAIN_TYPES, *CONTAINERS, *KINDS) or isinstance(value, np.generic | Enum)


def to_plain(value: Any, names: NameLookup | None = None) -> Any:
    """Return the value itself, or plain data in its place. Raises `TypeError` where there is none.

    Args:
        names: of objects that this run has built: each is replaced by its name, by which it is found again.
    """
    kind = type(value)
    if names and (name := names.get(value)) is not None:
        return {KIND: "object", "parts": [name]}
    if kind is dict and all(type(key) in PLAIN_TYPES for key in value) and KIND not in value:
        return {key: to_plain(item, names) for key, item in value.items()}
    if kind is dict:
        return {KIND: "dict", "parts": [[[to_plain(key, names), to_plain(item, names)] for key, item in value.items()]]}
    if kind in (list, tuple):
        return kind(to_plain(item, names) for item in value)
    if isinstance(value, Enum):
        return {KIND: "member", "parts": [_class_name(kind), value.name]}
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return {KIND: "named tuple", "parts": [_class_name(kind), to_plain(list(value), names)]}
    if kind in KINDS and not (kind is set and is_plain(value)):
        name, parts, _ = KINDS[kind]
        return {KIND: name, "parts": to_plain(parts(value), names)}
    if isinstance(value, np.generic):
        return {KIND: "number", "parts": [value.dtype.str, to_plain(value.item())]}
    if isinstance(value, nn.Parameter) and kind is nn.Parameter:
        return value.detach()
    if is_plain(value):
        return value
    raise TypeError(f"a {kind.__qualname__} has no plain form")


def to_plain_on_host(value: Any, names: NameLookup | None = None) -> Any:
    """Return the plain form of a value, its tensors on the host; NOT_KEPT where there is none."""
    try:
        return tree_map_only(Tensor, _on_host, to_plain(value, names))
    except (TypeError, RecursionError):  # the latter where an object contains itself
        return NOT_KEPT


def is_generator(value: Any) -> bool:
    return isinstance(value, GENERATORS)


def is_iterator(value: Any) -> bool:
    return type(value) in ITERATORS


def from_plain(form: Any, make: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """Return the value that `to_plain` was given, made anew. Raises `LookupError` where this run lacks a part of it.

    Args:
        make: by kind, functions that make further kinds.
    """
    if isinstance(form, dict):
        content = {key: from_plain(item, make) for key, item in form.items()}
        return {**MAKERS, **(make or {})}[content[KIND]](*content["parts"]) if KIND in form else content
    return type(form)(from_plain(item, make) for item in form) if type(form) in (list, tuple) else form


def attributes_with_plain_form(owner: Any) -> dict[str, Any]:
    """Return the attributes of an object that may have a plain form."""
    return {name: value for name, value in vars(owner).items() if may_have_plain_form(value)}


def set_attribute(owner: Any, name: str, form: Any, *, find: Find | None = None, device: Any = "cpu") -> None:
    """Set an attribute to the value of a plain form; an object of the same kind is filled, as others may refer to it.

    Classes are those of the present value: none is looked up by a name.

    Args:
        find: returns an object of this run by its name.
        device: of this rank.

    Raises:
        LookupError: a class or an object is missing.
        ConfigError: training cannot have given it this value.
    """
    present = getattr(owner, name, None)
    classes: dict[str, Any] = {_class_name(kind): kind for kind in _classes(present)}
    make = {
        "object": find or {}.__getitem__,
        "member": lambda kind, member: classes[kind][member],
        "named tuple": lambda kind, values: classes[kind]._make(values),
        ON_DEVICE: lambda tensor: tensor.to(device),
    }
    value = from_plain(form, make)
    if not restorable.is_restorable(owner, name, value):
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


def _on_host(tensor: Tensor) -> Any:
    copied = tensor.detach().to("cpu", copy=True)
    return copied if tensor.device.type == "cpu" else {KIND: ON_DEVICE, "parts": [copied]}


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _classes(value: Any, depth: int = 0) -> Iterator[type]:
    """Yield the classes of members of an Enum and of named tuples in a value."""
    if isinstance(value, Enum) or (isinstance(value, tuple) and hasattr(value, "_make")):
        yield type(value)
    if isinstance(value, dict | list | tuple | set | deque) and depth < 10:
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _classes(item, depth + 1)


def _layout(value: Any) -> Any:
    """Return what two tensors or arrays must share for one to be copied into the other; None for other values."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.is_leaf, value.is_inference()
    return (value.shape, value.dtype) if isinstance(value, np.ndarray) else None


def _fill_list(present: list, value: list) -> None:
    present[:] = value


def _fill_set_or_dict(present: Any, value: Any) -> None:
    present.clear()
    present |= value


def _fill_deque(present: deque, value: deque) -> None:
    present.clear()
    present.extend(value)


def _iterator_parts(value: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of those of itertools, from Python 3.12 on
        _, arguments, *state = value.__reduce__()
    arguments = [list(argument) if isinstance(argument, range) else argument for argument in arguments]
    return [arguments, state]


def _make_iterator(make: Callable[..., Any], arguments: list[Any], state: list[Any]) -> Any:
    iterator = make(*arguments)
    for position in state:
        iterator.__setstate__(position)
    return iterator


def _array_parts(value: np.ndarray) -> list[Any]:
    if value.dtype.kind not in "biufc":
        raise TypeError(f"an array of {value.dtype} has no plain form")
    native = value.dtype.newbyteorder("=")  # torch takes no other
    return [torch.from_numpy(value.astype(native, order="C"))]


def _defaultdict_parts(value: defaultdict) -> list[Any]:
    name = getattr(value.default_factory, "__name__", "")
    if FACTORIES.get(name) is not value.default_factory:
        raise TypeError(f"a defaultdict of {value.default_factory} has no plain form")
    return [name, dict(value)]


def _make_generator(state: dict[str, Any]) -> np.random.Generator:
    bits: Any = getattr(np.random, BIT_GENERATORS[BIT_GENERATORS.index(state["bit_generator"])])()
    bits.state = state
    return np.random.Generator(bits)


def _with_state(generator: Any, state: Any) -> Any:
    randomness.set_state(generator, state)
    return generator


Form = tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]  # its kind, the parts of a value, and its maker
KINDS: dict[type, Form] = {
    np.ndarray: ("array", _array_parts, lambda tensor: tensor.numpy()),
    set: ("set", lambda value: [list(value)], set),
    frozenset: ("frozenset", lambda value: [list(value)], frozenset),
    deque: ("deque", lambda value: [list(value), value.maxlen], deque),
    Counter: ("Counter", lambda value: [dict(value)], Counter),
    OrderedDict: ("OrderedDict", lambda value: [list(value.items())], OrderedDict),
    defaultdict: ("defaultdict", _defaultdict_parts, lambda name, content: defaultdict(FACTORIES[name], content)),
    np.random.Generator: ("numpy generator", lambda value: [value.bit_generator.state], _make_generator),
    np.random.RandomState: (
        "numpy state",
        lambda value: [value.get_state(legacy=False)],
        lambda state: _with_state(np.random.RandomState(), state),
    ),
    random.Random: ("Random", lambda value: [value.getstate()], lambda state: _with_state(random.Random(), state)),
    torch.Generator: (
        "torch generator",
        lambda value: [str(value.device), value.get_state()],
        lambda device, state: _with_state(torch.Generator(device), state),
    ),
    **{
        kind: (f"iterator {make.__name__}", _iterator_parts, partial(_make_iterator, make))
        for kind, make in ITERATORS.items()
    },
}
MAKERS: dict[str, Callable[..., Any]] = {name: make for name, _, make in KINDS.values()} | {
    ON_DEVICE: lambda tensor: tensor,
    "dict": dict,
    "number": lambda kind, item: np.dtype(kind).type(item),
}
FILLERS: dict[type, Callable[[Any, Any], object]] = {
    Tensor: lambda present, value: present.data.copy_(value),
    nn.Parameter: lambda present, value: present.data.copy_(value),
    np.ndarray: np.copyto,
    list: _fill_list,
    deque: _fill_deque,
    **dict.fromkeys((set, dict, Counter, OrderedDict, defaultdict), _fill_set_or_dict),
    **dict.fromkeys(GENERATORS, lambda present, value: randomness.set_state(present, randomness.get_state(value))),
}
