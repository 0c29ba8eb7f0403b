"""What a module, its data and its callbacks keep in attributes: numbers, words, tensors, arrays, lists of them.

A temperature that is set as an epoch begins, outputs that are gathered until it ends, a layer that is no longer frozen:
neither torch nor Lightning saves these. Of all attributes only those are kept that have changed since training began;
the others are what the config has built, and a run that goes on may mean to build them otherwise. What has changed and
cannot be kept is told when the run goes on.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
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
DATA, DATASET = "data", "dataset "
Changed = Sequence[tuple[str, str, Any]]  # owner, name, plain form
Built = dict[tuple[str, str], tuple[Any, Any]]  # of an owner and a name: what tells a change, and the value


def built(trainer: L.Trainer, module: L.LightningModule) -> Built:
    """What is there before training begins."""
    return {place: (forms.mark(value), value) for place, value in _all(trainer, module)}


def changed(trainer: L.Trainer, module: L.LightningModule, before: Built) -> Changed:
    """Owner, name and plain form of what is there now and was not in `built`, or was another; tensors on the host.

    `forms.NOT_KEPT` in place of what has no plain form, or what data workers have in copies of their own. A dataset
    that was made since, as loaders are reloaded, has changed nothing.
    """
    found, nothing = [], (object(), None)
    now = list(_all(trainer, module))
    made_since = {
        owner for (owner, name), value in now if not name and before.get((owner, ""), nothing)[1] is not value
    }
    for (owner, name), value in now:
        if owner in made_since:
            continue
        if before.get((owner, name), nothing)[0] != forms.mark(value):
            found.append((owner, name, forms.kept(value) if not owner.startswith(DATASET) else forms.NOT_KEPT))
    return found


def of_buffers(own: Mapping[str, Tensor]) -> Changed:
    """As `changed` returns what there is: buffers of this rank in place of those that the checkpoint has."""
    found = []
    for full, buffer in own.items():
        part, _, name = full.rpartition(".")
        found.append((f"module {part}", name, forms.kept(buffer)))
    return found


def restore(trainer: L.Trainer, module: L.LightningModule, state: Changed) -> None:
    """Set what `changed` returned, as far as this run has such owners, and tell so."""
    owners, kept, lost = dict(_owners(trainer, module)), dict[str, None](), dict[str, None]()
    for owner, name, form in state:
        if owner not in owners:
            continue
        (lost if form == forms.NOT_KEPT else kept)[name] = None
        if form != forms.NOT_KEPT:
            _put(trainer, owners[owner], name, form)
    if kept and trainer.is_global_zero:
        print(f"train: attributes go on with the values that they had: {', '.join(kept)}", flush=True)
    if lost and trainer.is_global_zero:
        said = "attributes begin anew, as a checkpoint does not hold them"
        print(f"warning: {said}: {', '.join(lost)}; a state_dict() of your module or data can", flush=True)


def restore_data(trainer: L.Trainer, state: Changed) -> Built:
    """Before loaders are made, what their DataModule makes them of. `restore` comes later.

    Returns:
        What was there before, for `built`.
    """
    data, before = getattr(trainer, "datamodule", None), {}
    for owner, name, form in state:
        if owner == DATA and data is not None and form != forms.NOT_KEPT:
            if hasattr(data, name):
                value = getattr(data, name)
                before[owner, name] = forms.mark(value), value
            _put(trainer, data, name, form)
    return before


def _put(trainer: L.Trainer, owner: Any, name: str, form: Any) -> None:
    device = trainer.strategy.root_device if isinstance(owner, nn.Module) else "cpu"
    forms.put(owner, name, tree_map_only(Tensor, lambda one: one.to(device), forms.unplain(form)))


def _all(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[tuple[str, str], Any]]:
    """Attributes, each below its owner's name and its own."""
    weights = {_storage(one) for one in (*module.parameters(), *module.buffers())} - {0}
    own = {id(part) for part in module.modules()}
    for owner, it in _owners(trainer, module):
        if isinstance(it, nn.Parameter):
            yield (owner, "requires_grad"), it.requires_grad
            continue
        if owner.startswith(DATASET):
            yield (owner, ""), it
        without = _of_libraries(it, is_saved=id(it) in own) | OURS
        for name, value in forms.data_of(it).items():
            if name in without or name.startswith(DEEPSPEED):
                continue
            if not any(_storage(one) in weights for one in tree_leaves(value) if isinstance(one, Tensor)):
                yield (owner, name), value  # else it is another view of a weight
        if isinstance(it, nn.Module):
            of_weights = {} if id(it) in own else {**it._parameters, **it._buffers}
            names = it._non_persistent_buffers_set  # torch tells it nowhere else
            of_weights |= {name: it._buffers[name] for name in names}
            yield from (((owner, name), one) for name, one in of_weights.items())


def _owners(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[str, Any]]:
    """Whatever keeps attributes, with a name for it.

    Also what is found in attributes: objects of the fork's own classes, and parts of networks that no checkpoint has,
    such as an average in a callback.
    """
    seen = {id(part) for part in module.modules()}
    for name, it in _holders(trainer, module):
        yield name, it
        yield from _inside(name, it, seen)


def _holders(trainer: L.Trainer, module: L.LightningModule) -> Iterator[tuple[str, Any]]:
    """Callbacks of libraries save themselves what they need."""
    yield from ((f"module {name}", part) for name, part in module.named_modules())
    yield from ((f"parameter {name}", parameter) for name, parameter in module.named_parameters())
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None:
        yield DATA, data
    loaders = trainer.fit_loop._combined_loader
    for number, loader in enumerate(loaders.flattened if loaders is not None else []):
        if hasattr(dataset := getattr(loader, "dataset", None), "__dict__"):
            yield f"{DATASET}{number}", dataset
    known = Counter[str]()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        kind = type(callback)
        if not kind.__module__.startswith(("lightning.", HERE)):
            known[kind.__qualname__] += 1
            yield f"callback {kind.__qualname__} {known[kind.__qualname__]}", callback


def _inside(owner: str, it: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    without = _of_libraries(it, is_saved=True)
    attributes = [(name, value) for name, value in getattr(it, "__dict__", {}).items() if name not in without]
    for name, value in [(name, one) for name, values in attributes for one in _entries(values)]:
        if id(value) in seen or not (isinstance(value, nn.Module) or _is_own(value)):
            continue
        seen.add(id(value))
        parts = value.named_modules() if isinstance(value, nn.Module) else [("", value)]
        for place, part in parts:
            seen.add(id(part))
            inner = f"{owner}.{name}.{place}"
            yield inner, part
            yield from _inside(inner, part, seen)


def _entries(value: Any) -> list[Any]:
    """A value, or what is in it; of a list that is long no networks are expected."""
    if type(value) is dict:
        return list(value.values())
    return list(value[:100]) if type(value) in (list, tuple) else [value]


def _is_own(value: Any) -> bool:
    module = type(value).__module__ or ""
    known = isinstance(value, Dataset | L.LightningDataModule | L.Callback)
    return module.startswith(f"{PACKAGE}.") and not module.startswith(HERE) and hasattr(value, "__dict__") and not known


def _storage(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()


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
