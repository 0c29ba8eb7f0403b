"""The attributes of one object that nobody else saves.

A checkpoint has the weights, buffers and optimizers; libraries restore their own objects. All other attributes are
yielded here, so that changes of them can be saved. So are the layers of a module, by their classes, and its hooks, by
their names: no checkpoint holds these, and where training changes them, that is named at the first save.
"""

from collections import deque
from collections.abc import Iterator, Set
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import AttributeDict
from torch import nn
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker

from hpc.config.project import HPC
from hpc.state import checksums, plain_forms

# Attributes that this package itself leaves on a module, and private ones of `hpc.data.data_module.DataModule`.
GRADIENT_NORM, SKIPS_NOT_FINITE = "_hpc_gradient_norm", "_hpc_skips_not_finite"
MODULE_ATTRIBUTES = {GRADIENT_NORM, SKIPS_NOT_FINITE}
DATA_MODULE_ATTRIBUTES = {"_datasets", "_has_noted_test_split"}
RNN_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})  # the parameters once more; torch keeps them up to date
DEEPSPEED = ("ds_", "applied_pre_backward")  # what it notes of a step on each part that it has given a `ds_id`
LIBRARIES = ("torch.", "lightning.", "torchmetrics.", "deepspeed.")
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
CONTENT = ""  # in place of an attribute's name: what an object holds beside its attributes
DATASET, SAVED = "dataset ", "saved "  # beginnings of owners' names
LAYERS, HOOKS = STRUCTURE = " layers", " hooks"  # in place of an attribute's name, which has no space
HOOK_KINDS = {  # the dicts in which torch keeps hooks of modules and parameters; it has no other way to list them
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}


def unsaved_fields(owner_name: str, owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each attribute that no library saves.

    For containers and stateful objects, also yield (CONTENT, content).
    """
    is_saved = has_saved_weights(owner_name)
    if owner_name.startswith(SAVED):
        return
    if is_saved and isinstance(owner, nn.Module | nn.Parameter):
        yield from layers_and_hooks(owner)
    if isinstance(owner, nn.Parameter):
        yield "requires_grad", owner.requires_grad
        if not is_saved:
            yield CONTENT, owner.detach()
        return
    if has_state_dict(owner):
        yield CONTENT, _read_state(owner)
        return
    if isinstance(owner, dict | list | set | deque) and not isinstance(owner, AttributeDict):
        yield CONTENT, next(kind for kind in (dict, list, set, deque) if isinstance(owner, kind))(owner)
    only_data = is_library_class(type(owner)) or owner_name.startswith(DATASET)  # their other attributes are their own
    yield from _unsaved_attributes(owner, is_saved=is_saved, only_data=only_data)
    if isinstance(owner, nn.Module):
        tensors = {**owner._parameters, **owner._buffers}
        names = owner._non_persistent_buffers_set if is_saved else tensors
        if is_saved and isinstance(owner, Metric):
            names = owner._buffers  # of a metric they are each rank's own
        yield from ((name, tensors[name]) for name in names if name in tensors)


def _unsaved_attributes(owner: Any, *, is_saved: bool, only_data: bool) -> Iterator[tuple[str, Any]]:
    attributes = _attributes(owner)
    left_out = library_attributes(owner, is_saved=is_saved)
    if "ds_id" in attributes:
        left_out |= {name for name in attributes if name.startswith(DEEPSPEED)}
    for name, value in attributes.items():
        is_function = is_saved and isinstance(value, FUNCTIONS) and not isinstance(owner, Metric)  # its activation, say
        if name in left_out or (only_data and not (is_function or plain_forms.may_have_plain_form(value))):
            continue
        if isinstance(value, MethodType) and value.__func__ is getattr(type(owner), name, None):
            continue  # the class's own method, put back by code that had replaced it
        yield name, value


def has_saved_weights(owner_name: str) -> bool:
    """Return whether the weights of this object are those of the module, which every checkpoint has."""
    return "/" not in owner_name and owner_name.startswith(("module ", "parameter "))


def may_have_changed(owner_name: str, owner: Any, name: str) -> bool:
    """Return whether `unsaved_fields` could have yielded an attribute of this name, as a checkpoint may be forged."""
    is_saved = has_saved_weights(owner_name)
    if owner_name.startswith((DATASET, SAVED)):
        return False
    if name == CONTENT:
        return not is_saved and not isinstance(owner, AttributeDict)
    if isinstance(owner, nn.Parameter):
        return name == "requires_grad"
    is_layer = isinstance(owner, nn.Module) and name in owner._modules
    return not is_layer and name not in library_attributes(owner, is_saved=is_saved)


def fill_content(owner: Any, content: Any) -> None:
    """Let an object hold what `unsaved_fields` yielded for CONTENT."""
    if isinstance(owner, nn.Parameter):
        owner.data.copy_(content)
    elif has_state_dict(owner):
        owner.load_state_dict(content)
    else:
        owner.clear()
        (owner.extend if isinstance(owner, list | deque) else owner.update)(content)


@cache
def is_library_class(kind: type) -> bool:
    """Return whether a class and all its bases come from the libraries."""
    return all(f"{base.__module__}.".startswith((*LIBRARIES, "builtins.")) for base in kind.__mro__)


@cache
def _has_base_of_hpc(kind: type) -> bool:
    return any(base.__module__.startswith(f"{HPC}.") for base in kind.__mro__)


def has_state_dict(value: Any) -> bool:
    """Return whether an object saves and restores itself by `state_dict`; modules do not count."""
    methods = (getattr(type(value), name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, (nn.Module, *checksums.BY_IDENTITY)) and all(map(callable, methods))


def slots(value: Any) -> dict[str, Any]:
    """Return the attributes that an object keeps in `__slots__`."""
    if isinstance(value, nn.Module):
        return {}
    declared = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = {name for entry in declared for name in ([entry] if isinstance(entry, str) else entry)}
    names -= {"__dict__", "__weakref__"}
    return {name: getattr(value, name) for name in sorted(names) if hasattr(value, name)}


def _read_state(owner: Any) -> Any:
    try:
        return owner.state_dict()
    except Exception:  # of any kind: it is other people's code
        return checksums.UNREADABLE


def _attributes(owner: Any) -> dict[str, Any]:
    return dict(owner) if isinstance(owner, AttributeDict) else {**slots(owner), **getattr(owner, "__dict__", {})}


def library_attributes(owner: Any, *, is_saved: bool) -> Set[str]:
    """Return the attributes that libraries and this package keep on such an object: they are never saved here.

    `training` is not among them, as researchers set it, too.
    """
    if isinstance(owner, L.LightningDataModule) and _has_base_of_hpc(type(owner)):
        return _attributes_of_new(L.LightningDataModule) | DATA_MODULE_ATTRIBUTES
    if isinstance(owner, Metric):  # its sums are saved with the epoch's, if it is a part of the module
        names = _attributes_of_new(_EmptyMetric)
        return names | owner._defaults.keys() if is_saved else names - {"_update_count"}
    for kind in (L.LightningModule, nn.Module, L.LightningDataModule):
        if isinstance(owner, kind):
            names = _attributes_of_new(kind) | MODULE_ATTRIBUTES
            return names | RNN_WEIGHTS if isinstance(owner, nn.RNNBase) else names
    return MODULE_ATTRIBUTES


class _EmptyMetric(Metric):
    def update(self) -> None: ...

    def compute(self) -> None: ...


@cache
def _attributes_of_new(kind: type) -> frozenset[str]:
    """Return the names of the attributes that a new instance of a class has."""
    return frozenset(vars(kind())) - {"training"}


def layers_and_hooks(owner: nn.Module | nn.Parameter) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield LAYERS with each layer's class, and HOOKS with the functions of each kind, without those of libraries."""
    if isinstance(owner, Metric | MetricTracker):  # the latter gets a further metric as each epoch begins
        return
    if isinstance(owner, nn.Module):
        yield LAYERS, {name: _class_name(layer) for name, layer in owner._modules.items()}
    hooks = {}
    for key, kind in HOOK_KINDS.items():
        names = map(_function_name, (getattr(owner, key, None) or {}).values())
        hooks[kind] = sorted(name for name in names if not name.startswith((*LIBRARIES, f"{HPC}.")))
    yield HOOKS, hooks


def _class_name(layer: nn.Module | None) -> str:
    """Return the name of a layer's class, without the subclass that FSDP makes of it."""
    classes = type(layer).__mro__
    return next(kind.__qualname__ for kind in classes if not kind.__module__.startswith("torch.distributed."))


def _function_name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    function = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{function.__module__}.{function.__qualname__}"
