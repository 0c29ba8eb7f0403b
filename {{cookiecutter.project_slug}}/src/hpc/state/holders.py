"""Find whatever keeps attributes in a run, each under a name that is the same in every attempt.

The module, its parts and parameters, the DataModule, datasets, what collates their samples, callbacks of the
researcher's own; and in the attributes of these, also within lists and dicts: objects of the fork's own classes,
networks that no checkpoint has (an average, say), and what can tell its state, as an optimizer that the module steps by
itself. Such a name ends with the object's class, so that nothing is ever put into an object of another one.
"""

from collections import Counter, deque
from collections.abc import Iterator, Set
from enum import Enum
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor, nn
from torchmetrics import Metric

from hpc.checkpoint import weights
from hpc.config.project import HPC, researcher_packages
from hpc.state import checksums, plain_forms, structure

# Attributes that this package itself leaves on a module, and those that its DataModule keeps.
GRADIENT_NORM, SKIPS_NOT_FINITE = "_hpc_gradient_norm", "_hpc_skips_not_finite"
OURS = {GRADIENT_NORM, SKIPS_NOT_FINITE, "_splits", "_told"}
DEEPSPEED = ("ds_", "applied_pre_backward")  # what it notes of a step on each part that it has given a `ds_id`
LIBRARIES = ("torch.", "lightning.", "torchmetrics.", "deepspeed.", "builtins.")
HERE = f"{HPC}."
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
SIMPLE = {bool, int, float, str, type(None), Tensor}
DATA, DATASET, COLLATE, SAVED = "DataModule", "dataset ", "collate ", "saved "
MOST_ENTRIES, DEEPEST = 1000, 10  # a longer or deeper container is one value
VIEW = "a view of a weight"
CONTENT = ""  # in the place of an attribute's name: what an object holds besides


def of_run(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """All that keep attributes, by their names; first those that Lightning knows."""
    return below(dict(_roots(trainer, module)))


def below(there: dict[str, Any]) -> dict[str, Any]:
    """These, and what is found in them."""
    found, left, seen = dict(there), deque(there.items()), {id(it) for it in there.values()}
    while left:
        owner, it = left.popleft()
        for name, value in fields(owner, it) if not _has_state(it) else ():
            for place, inner in _objects(f"{owner}/{name}", value):
                for whole, part in parts(place, inner).items():
                    if id(part) not in seen:
                        seen.add(id(part))
                        found[whole] = part
                        left.append((whole, part))
    return found


def parts(place: str, it: Any) -> dict[str, Any]:
    """An object, and where it is a network, the parts of it."""
    if not isinstance(it, nn.Module):
        return {place: it}
    return {f"{place}/{path} ({type(part).__qualname__})" if path else place: part for path, part in it.named_modules()}


def fields(owner: str, it: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of one of them that nobody saves, by name; below CONTENT what it holds besides."""
    is_saved = "/" not in owner and owner.startswith(("module ", "parameter "))
    if owner.startswith(SAVED):
        return
    if is_saved and isinstance(it, nn.Module | nn.Parameter):
        yield from structure.of(it)
    if isinstance(it, nn.Parameter):
        yield "requires_grad", it.requires_grad
        if not is_saved:
            yield CONTENT, it.detach()
        return
    if _has_state(it):
        yield CONTENT, _state(it)
        return
    if isinstance(it, dict | list | set | deque) and not isinstance(it, AttributeDict):
        yield CONTENT, next(kind for kind in (dict, list, set, deque) if isinstance(it, kind))(it)
    without = _of_libraries(it, is_saved=is_saved) | OURS
    if "ds_id" in _attributes(it):
        without |= {name for name in _attributes(it) if name.startswith(DEEPSPEED)}
    only_data = is_of_library(type(it)) or owner.startswith(DATASET)  # what else they keep is their own affair
    for name, value in _attributes(it).items():
        is_layers = is_saved and isinstance(value, FUNCTIONS) and not isinstance(it, Metric)  # its activation, say
        if name in without or (only_data and not (is_layers or plain_forms.holds_data(value))):
            continue
        if isinstance(value, MethodType) and value.__func__ is getattr(type(it), name, None):
            continue  # the class's own, put back by who had put another one there
        yield name, value
    if isinstance(it, nn.Module):
        tensors = {**it._parameters, **it._buffers}
        left = it._non_persistent_buffers_set if is_saved else tensors
        yield from ((name, tensors[name]) for name in left if name in tensors)


class Names:
    """Of a run's objects: those that keep attributes, and `VIEW` for a tensor that is another view of a weight."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.there = of_run(trainer, module)
        self._owners = {id(it): owner for owner, it in self.there.items()}
        buffers = [
            buffer
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and name not in part._non_persistent_buffers_set  # torch tells it nowhere else
        ]
        self._weights = {_storage(one) for one in (*module.parameters(), *buffers)} - {0}

    def get(self, value: Any) -> str | None:
        """None: it has none."""
        owner = self._owners.get(id(value))
        return VIEW if owner is None and isinstance(value, Tensor) and _storage(value) in self._weights else owner


def fill(it: Any, content: Any) -> None:
    """Let an object hold what `fields` gave for CONTENT."""
    if isinstance(it, nn.Parameter):
        it.data.copy_(content)
    elif _has_state(it):
        it.load_state_dict(content)
    else:
        it.clear()
        (it.extend if isinstance(it, list | deque) else it.update)(content)


def root(owner: str) -> str:
    """The name of that one of Lightning's in which it was found."""
    return owner.partition("/")[0]


def attribute(owner: str, name: str) -> str:
    """What a person calls it: the attribute of the one that Lightning knows."""
    return owner.split("/")[1].partition(" (")[0] if "/" in owner else name


def _roots(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[str, Any]]:
    """Callbacks of libraries save themselves what they need, and what is shown is no state."""
    yield from ((f"{SAVED}optimizer {number}", one) for number, one in enumerate(trainer.optimizers))
    schedules = (config.scheduler for config in trainer.lr_scheduler_configs)
    yield from ((f"{SAVED}schedule {number}", one) for number, one in enumerate(schedules))
    yield from ((f"module {name}", part) for name, part in module.named_modules())
    yield from ((f"parameter {name}", parameter) for name, parameter in module.named_parameters())
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None:
        yield DATA, data
    loaders = trainer.fit_loop._combined_loader
    for number, loader in enumerate(loaders.flattened if loaders is not None else []):
        if hasattr(dataset := getattr(loader, "dataset", None), "__dict__"):
            yield f"{DATASET}{number}", dataset
        collate = getattr(loader, "collate_fn", None)
        if is_holder(collate := getattr(collate, "__self__", collate)):
            yield f"{COLLATE}{number}", collate
    known = Counter[str]()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind = type(callback)
        if not kind.__module__.startswith(("lightning.", HERE)) and not isinstance(callback, ProgressBar):
            known[kind.__qualname__] += 1
            yield f"callback {kind.__qualname__} {known[kind.__qualname__]}", callback


def _objects(place: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """A value, or those of its entries, that keep attributes."""
    if type(value) in SIMPLE:
        return
    if is_holder(value):
        yield f"{place} ({type(value).__qualname__})", value
    elif isinstance(value, dict | list | tuple | deque) and len(value) <= MOST_ENTRIES and depth < DEEPEST:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if type(one) not in SIMPLE:
                yield from _objects(f"{place}[{key!r}]", one, depth + 1)


@cache
def is_of_library(kind: type) -> bool:
    return all(f"{base.__module__}.".startswith(LIBRARIES) for base in kind.__mro__)


def is_holder(value: Any) -> bool:
    """Is it an object whose attributes are kept one by one?"""
    kind = type(value)
    if isinstance(value, (Enum, BaseException, tuple, *checksums.BY_IDENTITY)):
        return False
    if isinstance(value, nn.Module | nn.Parameter | SimpleNamespace) or _has_state(value):
        return True
    if isinstance(value, dict | list | set | deque):
        return kind not in plain_forms.CONTAINERS
    is_own = kind.__module__.partition(".")[0] in researcher_packages()
    return is_own and (hasattr(value, "__dict__") or bool(_slots(value)))


def can_be_copied(it: Any) -> bool:
    """Is all of it in its attributes and weights? An optimizer is bound to those of others."""
    return not (_has_state(it) or isinstance(it, (L.LightningModule, nn.Parameter, *checksums.BY_IDENTITY)))


def _has_state(it: Any) -> bool:
    asked = (getattr(type(it), name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(it, (nn.Module, *checksums.BY_IDENTITY)) and all(map(callable, asked))


def _state(it: Any) -> Any:
    try:
        return it.state_dict()
    except Exception:  # somebody else's
        return checksums.UNSEEN


def _attributes(it: Any) -> dict[str, Any]:
    return dict(it) if isinstance(it, AttributeDict) else {**_slots(it), **getattr(it, "__dict__", {})}


def _slots(it: Any) -> dict[str, Any]:
    if isinstance(it, nn.Module):
        return {}
    slots = (vars(kind).get("__slots__", ()) for kind in type(it).__mro__)
    names = {name for some in slots for name in ([some] if isinstance(some, str) else some)}
    return {name: getattr(it, name) for name in sorted(names - {"__dict__", "__weakref__"}) if hasattr(it, name)}


def _storage(tensor: Tensor) -> int:
    try:
        return weights.storage(tensor)
    except (RuntimeError, NotImplementedError):  # a sparse one has none
        return 0


def _of_libraries(owner: Any, *, is_saved: bool) -> Set[str]:
    """Attributes that a library keeps on any such object; `training` is the researcher's as well."""
    if isinstance(owner, Metric):  # its sums are kept with the epoch's, if it is a part of the module
        return _BARE["metric"]() | owner._defaults.keys() if is_saved else _BARE["metric"]() - {"_update_count"}
    for kind, name in ((L.LightningModule, "module"), (nn.Module, "part"), (L.LightningDataModule, "data")):
        if isinstance(owner, kind):
            return _BARE[name]()
    return frozenset()


class _Bare(Metric):
    def update(self) -> None: ...

    def compute(self) -> None: ...


def _names(kind: type) -> Any:
    return cache(lambda: frozenset(vars(kind())) - {"training"})


_BARE = {
    "metric": _names(_Bare),
    "module": _names(L.LightningModule),
    "part": _names(nn.Module),
    "data": _names(L.LightningDataModule),
}
