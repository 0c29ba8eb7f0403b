"""What a module, its data and its callbacks keep in attributes: numbers, words, tensors, arrays, lists of them.

A temperature that is set as an epoch begins, outputs that are gathered until it ends, a layer that is no longer frozen:
neither torch nor Lightning saves these. Of all attributes only those are kept that have changed since training began;
the others are what the config has built, and a run that goes on may mean to build them otherwise. What has changed and
cannot be kept is told when the run goes on.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from functools import cache
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset
from torchmetrics import Metric

from ..config import PACKAGE
from . import forms

OURS = {"gradient_norm", "skip_not_finite"}  # what this project itself leaves on a module
DEEPSPEED = ("ds_", "applied_pre_backward")  # what it notes of a step on each part
HERE = f"{PACKAGE}.hpc."
DATASET = "dataset "
Built = dict[tuple[str, str], tuple[Any, Any]]  # of an owner and a name: what tells a change, and the value


def built(trainer: L.Trainer, module: L.LightningModule) -> Built:
    """What is there before training begins."""
    return {place: (forms.mark(value), value) for place, value in _all(trainer, module)}


def changed(trainer: L.Trainer, module: L.LightningModule, before: Built) -> list[tuple[str, str, Any]]:
    """Owner, name and plain form of what is there now and was not in `built`, or was another; tensors on the host.

    `forms.NOT_KEPT` in place of what has no plain form, or what data workers have in copies of their own.
    """
    found, nothing = [], (object(), None)
    for (owner, name), value in _all(trainer, module):
        if before.get((owner, name), nothing)[0] != forms.mark(value):
            found.append((owner, name, forms.kept(value) if not owner.startswith(DATASET) else forms.NOT_KEPT))
    return found


def restore(trainer: L.Trainer, module: L.LightningModule, state: Sequence[tuple[str, str, Any]]) -> None:
    """Set what `changed` returned, as far as this run has such owners, and tell so."""
    owners, kept, lost = dict(_owners(trainer, module)), dict[str, None](), dict[str, None]()
    for owner, name, form in state:
        if owner not in owners:
            continue
        (lost if form == forms.NOT_KEPT else kept)[name] = None
        if form != forms.NOT_KEPT:
            device = trainer.strategy.root_device if isinstance(owners[owner], nn.Module) else "cpu"
            value = tree_map_only(Tensor, lambda one, device=device: one.to(device), forms.unplain(form))
            forms.put(owners[owner], name, value)
    if kept and trainer.is_global_zero:
        print(f"train: attributes go on with the values that they had: {', '.join(kept)}", flush=True)
    if lost and trainer.is_global_zero:
        said = "attributes begin anew, as a checkpoint does not hold them"
        print(f"warning: {said}: {', '.join(lost)}; a state_dict() of your module or data can", flush=True)


def _all(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[tuple[str, str], Any]]:
    """Attributes, each below its owner's name and its own."""
    weights = {_storage(one) for one in (*module.parameters(), *module.buffers())} - {0}
    for owner, it in _owners(trainer, module):
        if isinstance(it, nn.Parameter):
            yield (owner, "requires_grad"), it.requires_grad
            continue
        without = _of_libraries(it) | OURS
        for name, value in forms.data_of(it).items():
            if name in without or name.startswith(DEEPSPEED):
                continue
            if not any(_storage(one) in weights for one in tree_leaves(value) if isinstance(one, Tensor)):
                yield (owner, name), value  # else it is another view of a weight
        for name in getattr(it, "_non_persistent_buffers_set", ()):  # torch tells it nowhere else
            yield (owner, name), it._buffers[name]


def _owners(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[str, Any]]:
    """Whatever keeps attributes, with a name for it; also objects of the fork's own classes below these."""
    seen: set[int] = set()
    for name, it in _holders(trainer, module):
        yield from _with_own(name, it, seen)


def _holders(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[str, Any]]:
    """Callbacks of libraries save themselves what they need."""
    yield from ((f"module {name}", part) for name, part in module.named_modules())
    yield from ((f"parameter {name}", parameter) for name, parameter in module.named_parameters())
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None:
        yield "data", data
    for number, loader in enumerate(trainer.fit_loop._combined_loader.flattened):  # type: ignore[union-attr]
        yield f"{DATASET}{number}", getattr(loader, "dataset", None)
    known = Counter[str]()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind = type(callback)
        if not kind.__module__.startswith(("lightning.", HERE)):
            known[kind.__qualname__] += 1
            yield f"callback {kind.__qualname__} {known[kind.__qualname__]}", callback


def _with_own(name: str, it: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(it) in seen or not hasattr(it, "__dict__"):
        return
    seen.add(id(it))
    yield name, it
    for attribute, value in list(vars(it).items()):
        module = type(value).__module__ or ""
        is_own = module.startswith(f"{PACKAGE}.") and not module.startswith(HERE)
        if is_own and not isinstance(value, nn.Module | Dataset | L.LightningDataModule | L.Callback):
            yield from _with_own(f"{name}.{attribute}", value, seen)


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
