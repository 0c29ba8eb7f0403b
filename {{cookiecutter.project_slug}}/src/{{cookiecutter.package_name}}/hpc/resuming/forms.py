"""Plain data for what a checkpoint cannot hold as it is, and what a researcher keeps all the same: numpy's arrays and
numbers, the containers of `collections`, and random number generators."""

import random
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..checkpoints.plain import PLAIN, is_plain

KIND, NOT_KEPT = "of kind", "not kept"
MOST_ENTRIES, MOST_BYTES = 100_000, 2**26  # of a longer container, or a larger array, some entries are looked at
FACTORIES = {factory.__name__: factory for factory in (int, float, list, dict, set, str)}
BITS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
CONTAINERS = (dict, list, tuple, set, deque, Counter, OrderedDict, defaultdict)
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


def holds_data(value: Any) -> bool:
    """Is it of a kind that may have a plain form? Whether it has one depends on what is in it."""
    return type(value) in (*PLAIN, *CONTAINERS, *KINDS) or isinstance(value, np.generic)


def plain(value: Any) -> Any:
    """The value itself, or plain data in its place. Raises `TypeError` where there is none."""
    kind = type(value)
    if kind is dict:
        return {key: plain(one) for key, one in value.items()}
    if kind in (list, tuple):
        return kind(map(plain, value))
    if kind in KINDS:
        name, parts, _ = KINDS[kind]
        return {KIND: name, "parts": plain(parts(value))}
    if isinstance(value, np.generic):
        return {KIND: "number", "parts": [value.dtype.str, plain(value.item())]}
    if is_plain(value):
        return value
    raise TypeError(f"a {kind.__qualname__} has no plain form")


def kept(value: Any) -> Any:
    """The plain form of a value, its tensors on the host; NOT_KEPT where there is none."""
    try:
        return plain(tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), value))
    except TypeError:
        return NOT_KEPT


def is_generator(value: Any) -> bool:
    return isinstance(value, GENERATORS)


def unplain(form: Any) -> Any:
    """The value that `plain` was given, made anew."""
    if isinstance(form, dict):
        content = {key: unplain(one) for key, one in form.items()}
        return MAKERS[content[KIND]](*content["parts"]) if KIND in form else content
    return type(form)(map(unplain, form)) if type(form) in (list, tuple) else form


def data_of(owner: Any) -> dict[str, Any]:
    """Those of its attributes that may have a plain form."""
    return {name: value for name, value in vars(owner).items() if holds_data(value)}


def mark(value: Any) -> Any:
    """Equal for the same value. A tensor is another one when it was written to; its content is not looked at."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        some = value if value.nbytes <= MOST_BYTES else value[:: max(1, len(value) // MOST_ENTRIES)]
        return value.shape, zlib.crc32(some.tobytes())
    if isinstance(value, GENERATORS):
        leaves = tree_leaves(plain(value))
        return [zlib.crc32(leaf.numpy().tobytes()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    if type(value) in CONTAINERS:
        content = islice(value.items() if isinstance(value, dict) else value, 0, None, 1 + len(value) // MOST_ENTRIES)
        return [type(value), len(value), *map(mark, content)]
    return type(value), repr(value) if holds_data(value) else None  # of an object nothing is seen


def put(owner: Any, name: str, value: Any) -> None:
    """Set an attribute. Where one of this kind is there it takes the content, as others may have it, too."""
    now = getattr(owner, name, None)
    fill = IN_PLACE.get(type(now))
    if isinstance(now, nn.Parameter):
        now.data.copy_(value)
    elif fill and type(now) is type(value) and _shape(now) == _shape(value):
        fill(now, value)
    else:
        setattr(owner, name, value)


def _shape(value: Any) -> Any:
    """Of those that take only what has the same; a tensor of a graph takes nothing."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad, value.is_inference()
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
    return [torch.from_numpy(value.copy())]


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
MAKERS = {name: make for name, _, make in KINDS.values()} | {"number": lambda kind, item: np.dtype(kind).type(item)}
IN_PLACE: dict[type, Callable[[Any, Any], object]] = {
    Tensor: lambda now, value: now.copy_(value),
    np.ndarray: np.copyto,
    list: _fill_list,
    deque: _fill_deque,
    **dict.fromkeys((set, dict, Counter, OrderedDict, defaultdict), _fill_content),
    np.random.Generator: _fill_bits,
    np.random.RandomState: lambda now, value: now.set_state(value.get_state()),
    random.Random: lambda now, value: now.setstate(value.getstate()),
    torch.Generator: lambda now, value: now.set_state(value.get_state()),
}
