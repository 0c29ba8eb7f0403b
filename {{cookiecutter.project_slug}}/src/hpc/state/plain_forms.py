"""Plain data for what a checkpoint cannot hold as it is, and what a researcher keeps all the same: numpy's arrays and
numbers, the containers of `collections`, random number generators, members of an Enum, and where an object stands."""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from hpc.checkpoint.plain_data import PLAIN, is_plain
from hpc.state.checksums import Names

KIND, NOT_KEPT, NOT_SEEN = "of kind", "not kept", "not seen"
ON_DEVICE = "on device"  # a tensor of the rank's device: saved on the host, and brought back there
FACTORIES = {factory.__name__: factory for factory in (int, float, list, dict, set, str)}
BITS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
FIXED = {kind for kind in PLAIN if kind is not Tensor}  # whose values never change
CONTAINERS = (dict, list, tuple, set, deque, Counter, OrderedDict, defaultdict)
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
Find = Callable[[str], Any]  # an object by its name; raises `LookupError`


def holds_data(value: Any) -> bool:
    """Is it of a kind that may have a plain form? Whether it has one depends on what is in it."""
    return type(value) in (*PLAIN, *CONTAINERS, *KINDS) or isinstance(value, np.generic | Enum)


def plain(value: Any, names: Names | None = None) -> Any:
    """The value itself, or plain data in its place. Raises `TypeError` where there is none.

    Args:
        names: of objects that this run has built, and that are found again by their name.
    """
    kind = type(value)
    if names and (name := names.get(value)) is not None:
        return {KIND: "object", "parts": [name]}
    if kind is dict and all(type(key) in PLAIN for key in value) and KIND not in value:
        return {key: plain(one, names) for key, one in value.items()}
    if kind is dict:
        return {KIND: "dict", "parts": [[[plain(key, names), plain(one, names)] for key, one in value.items()]]}
    if kind in (list, tuple):
        return kind(plain(one, names) for one in value)
    if isinstance(value, Enum):
        return {KIND: "member", "parts": [_class(kind), value.name]}
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return {KIND: "named tuple", "parts": [_class(kind), plain(list(value), names)]}
    if kind in KINDS and not (kind is set and is_plain(value)):
        name, parts, _ = KINDS[kind]
        return {KIND: name, "parts": plain(parts(value), names)}
    if isinstance(value, np.generic):
        return {KIND: "number", "parts": [value.dtype.str, plain(value.item())]}
    if isinstance(value, nn.Parameter) and kind is nn.Parameter:
        return value.detach()
    if is_plain(value):
        return value
    raise TypeError(f"a {kind.__qualname__} has no plain form")


def kept(value: Any, names: Names | None = None) -> Any:
    """The plain form of a value, its tensors on the host; NOT_KEPT where there is none."""
    try:
        return tree_map_only(Tensor, _on_host, plain(value, names))
    except (TypeError, RecursionError):  # of what leads to itself, too
        return NOT_KEPT


def content(form: Any) -> Any:
    """Of a tensor's form the tensor, on the host."""
    return form["parts"][0] if isinstance(form, dict) and form.get(KIND) == ON_DEVICE else form


def is_generator(value: Any) -> bool:
    return isinstance(value, GENERATORS)


def unplain(form: Any, make: Mapping[str, Callable[..., Any]] | None = None) -> Any:
    """The value that `plain` was given, made anew. Raises `LookupError` where this run lacks what it is made of.

    Args:
        make: how further kinds are made.
    """
    if isinstance(form, dict):
        content = {key: unplain(one, make) for key, one in form.items()}
        return {**MAKERS, **(make or {})}[content[KIND]](*content["parts"]) if KIND in form else content
    return type(form)(unplain(one, make) for one in form) if type(form) in (list, tuple) else form


def data_of(owner: Any) -> dict[str, Any]:
    """Those of its attributes that may have a plain form."""
    return {name: value for name, value in vars(owner).items() if holds_data(value)}


def put(owner: Any, name: str, form: Any, *, find: Find | None = None, device: Any = "cpu") -> None:
    """Set an attribute. Where one of this kind is there it takes the content, as others may have it, too.

    Classes are those of what is there: none is looked up by a name. Raises `LookupError` where one is missing.

    Args:
        find: gives an object of this run by its name.
        device: of this rank.
    """
    now = getattr(owner, name, None)
    classes: dict[str, Any] = {_class(kind): kind for kind in _classes(now)}
    make = {
        "object": find or {}.__getitem__,
        "member": lambda kind, member: classes[kind][member],
        "named tuple": lambda kind, values: classes[kind]._make(values),
        ON_DEVICE: lambda tensor: tensor.to(device),
    }
    value = unplain(form, make)
    fill = IN_PLACE.get(type(now))
    is_alike = fill and type(value) in (type(now), Tensor) and _shape(now) == _shape(value)
    with suppress(RuntimeError, ValueError):  # one that cannot be written to, or only as a whole
        if fill and is_alike and value is not now:
            fill(now, value)
            return
    if value is not now:
        setattr(owner, name, value)


def _on_host(tensor: Tensor) -> Any:
    copied = tensor.detach().to("cpu", copy=True)
    return copied if tensor.device.type == "cpu" else {KIND: ON_DEVICE, "parts": [copied]}


def _class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _classes(value: Any, depth: int = 0) -> Iterator[type]:
    """Of members of an Enum and of named tuples."""
    if isinstance(value, Enum) or (isinstance(value, tuple) and hasattr(value, "_make")):
        yield type(value)
    if isinstance(value, dict | list | tuple | set | deque) and depth < 10:
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _classes(one, depth + 1)


def _shape(value: Any) -> Any:
    """Of those that take only what has the same; a tensor of a graph takes nothing."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.is_leaf, value.is_inference()
    return (value.shape, value.dtype) if isinstance(value, np.ndarray) else None


def _fill_list(now: list, value: list) -> None:
    now[:] = value


def _fill_content(now: Any, value: Any) -> None:
    now.clear()
    now |= value


def _fill_deque(now: deque, value: deque) -> None:
    now.clear()
    now.extend(value)


def _fill_bits(now: np.random.Generator, value: np.random.Generator) -> None:
    now.bit_generator.state = value.bit_generator.state


def _array(value: np.ndarray) -> list[Any]:
    if value.dtype.kind not in "biufc":
        raise TypeError(f"an array of {value.dtype} has no plain form")
    native = value.dtype.newbyteorder("=")  # torch takes no other
    return [torch.from_numpy(value.astype(native, order="C"))]


def _defaults(value: defaultdict) -> list[Any]:
    name = getattr(value.default_factory, "__name__", "")
    if FACTORIES.get(name) is not value.default_factory:
        raise TypeError(f"what makes the defaults is {value.default_factory}")
    return [name, dict(value)]


def _seeded(state: dict[str, Any]) -> np.random.Generator:
    bits: Any = getattr(np.random, BITS[BITS.index(state["bit_generator"])])()
    bits.state = state
    return np.random.Generator(bits)


def _set(generator: Any, state: Any) -> Any:
    (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)
    return generator


Form = tuple[str, Callable[[Any], list[Any]], Callable[..., Any]]  # its name, of what it is made, and how
KINDS: dict[type, Form] = {
    np.ndarray: ("array", _array, lambda tensor: tensor.numpy()),
    set: ("set", lambda it: [list(it)], set),
    frozenset: ("frozenset", lambda it: [list(it)], frozenset),
    deque: ("deque", lambda it: [list(it), it.maxlen], deque),
    Counter: ("Counter", lambda it: [dict(it)], Counter),
    OrderedDict: ("OrderedDict", lambda it: [list(it.items())], OrderedDict),
    defaultdict: ("defaultdict", _defaults, lambda name, content: defaultdict(FACTORIES[name], content)),
    np.random.Generator: ("numpy generator", lambda it: [it.bit_generator.state], _seeded),
    np.random.RandomState: (
        "numpy state",
        lambda it: [it.get_state(legacy=False)],
        lambda state: _set(np.random.RandomState(), state),
    ),
    random.Random: ("Random", lambda it: [it.getstate()], lambda state: _set(random.Random(), state)),
    torch.Generator: (
        "torch generator",
        lambda it: [str(it.device), it.get_state()],
        lambda device, state: _set(torch.Generator(device), state),
    ),
}
MAKERS: dict[str, Callable[..., Any]] = {name: make for name, _, make in KINDS.values()} | {
    ON_DEVICE: lambda tensor: tensor,
    "dict": dict,
    "number": lambda kind, item: np.dtype(kind).type(item),
}
IN_PLACE: dict[type, Callable[[Any, Any], object]] = {
    Tensor: lambda now, value: now.data.copy_(value),
    nn.Parameter: lambda now, value: now.data.copy_(value),
    np.ndarray: np.copyto,
    list: _fill_list,
    deque: _fill_deque,
    **dict.fromkeys((set, dict, Counter, OrderedDict, defaultdict), _fill_content),
    np.random.Generator: _fill_bits,
    np.random.RandomState: lambda now, value: now.set_state(value.get_state()),
    random.Random: lambda now, value: now.setstate(value.getstate()),
    torch.Generator: lambda now, value: now.set_state(value.get_state()),
}
