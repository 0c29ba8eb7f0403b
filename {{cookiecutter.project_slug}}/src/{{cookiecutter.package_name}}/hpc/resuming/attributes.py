"""What a module, its data and its callbacks keep in plain attributes: numbers, words, tensors, lists and dicts of them.

A temperature that is set as an epoch begins, outputs that are gathered until it ends, a layer that is no longer frozen:
neither torch nor Lightning saves these. Of all attributes only those are kept that have changed since training began;
the others are what the config has built, and a run that goes on may mean to build them otherwise.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from functools import cache
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric

from ..checkpoints.plain import is_plain
from ..config import PACKAGE

OURS = {"gradient_norm", "skip_not_finite"}  # what this project itself leaves on a module
DEEPSPEED = ("ds_", "applied_pre_backward")  # what it notes of a step on each part
Built = dict[tuple[str, str], tuple[Any, Any]]  # of an owner and a name: what tells a change, and the value


def built(trainer: L.Trainer, module: L.LightningModule) -> Built:
    """What is there before training begins."""
    return {place: (_mark(value), value) for place, value in _kept(trainer, module)}


def changed(trainer: L.Trainer, module: L.LightningModule, before: Built) -> list[tuple[str, str, Any]]:
    """Owner, name and value of what is there now and was not in `built`, or was another; tensors on the host."""
    found, nothing = [], (object(), None)
    for (owner, name), value in _kept(trainer, module):
        if before.get((owner, name), nothing)[0] != _mark(value):
            found.append((owner, name, tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), value)))
    return found


def restore(trainer: L.Trainer, module: L.LightningModule, state: Sequence[tuple[str, str, Any]]) -> None:
    """Set what `changed` returned, as far as this run has such owners, and tell so."""
    owners = dict(_owners(trainer, module))
    state = [(owner, name, value) for owner, name, value in state if owner in owners]
    for owner, name, value in state:
        device = trainer.strategy.root_device if isinstance(owners[owner], nn.Module) else "cpu"
        setattr(owners[owner], name, tree_map_only(Tensor, lambda one, device=device: one.to(device), value))
    if state and trainer.is_global_zero:
        names = ", ".join(dict.fromkeys(name for _, name, _ in state))
        print(f"train: attributes go on with the values that they had: {names}", flush=True)


def _kept(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[tuple[str, str], Any]]:
    """Plain attributes, each below its owner's name and its own."""
    weights = {_storage(one) for one in (*module.parameters(), *module.buffers())} - {0}
    for owner, it in _owners(trainer, module):
        if isinstance(it, nn.Parameter):
            yield (owner, "requires_grad"), it.requires_grad
            continue
        without = _of_libraries(it) | OURS
        for name, value in vars(it).items():
            if name in without or name.startswith(DEEPSPEED) or not is_plain(value):
                continue
            if not any(_storage(one) in weights for one in tree_leaves(value) if isinstance(one, Tensor)):
                yield (owner, name), value  # else it is another view of a weight
        for name in getattr(it, "_non_persistent_buffers_set", ()):  # torch tells it nowhere else
            yield (owner, name), it._buffers[name]


def _owners(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[str, Any]]:
    """Whatever keeps attributes, with a name for it. Callbacks of libraries save themselves what they need."""
    yield from ((f"module {name}", part) for name, part in module.named_modules())
    yield from ((f"parameter {name}", parameter) for name, parameter in module.named_parameters())
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None:
        yield "data", data
    ours, known = f"{PACKAGE}.hpc.", Counter[str]()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind = type(callback)
        if not kind.__module__.startswith(("lightning.", ours)):
            known[kind.__qualname__] += 1
            yield f"callback {kind.__qualname__} {known[kind.__qualname__]}", callback


def _storage(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


def _of_libraries(owner: Any) -> Set[str]:
    """Attributes that a library keeps on any such object; `training` is the researcher's as well."""
    if isinstance(owner, Metric):  # its sums are kept with the epoch's
        return _BARE["metric"]() | owner._defaults.keys()
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


def _mark(value: Any) -> Any:
    """Equal for the same value. A tensor is another one when it was written to; its content is not looked at."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, dict):
        return [(key, _mark(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(_mark, value)]
    return type(value), repr(value)
