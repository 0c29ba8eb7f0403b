"""What a module is made of besides weights and attributes: its layers, by their classes, and hooks, by their names.

A checkpoint holds none of these. Where training has changed them, a run that goes on is told what it has otherwise.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker

from hpc.config.project import HPC

LAYERS, HOOKS = " layers", " hooks"  # in the place of an attribute's name, which has no space
LIBRARIES = ("torch.", "lightning.", "torchmetrics.", "deepspeed.", f"{HPC}.")
KINDS = {  # the dicts in which torch keeps hooks of modules and parameters; it has no other way to list them
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}


def of(it: nn.Module | nn.Parameter) -> Iterator[tuple[str, dict[str, Any]]]:
    """LAYERS with the class of each, and HOOKS with the functions of each kind; those of libraries are left out."""
    if isinstance(it, Metric | MetricTracker):  # the latter has a further metric as each epoch begins
        return
    if isinstance(it, nn.Module):
        yield LAYERS, {name: _class(layer) for name, layer in it._modules.items()}
    hooks = {words: (getattr(it, kind, None) or {}).values() for kind, words in KINDS.items()}
    names = {words: sorted(_name(hook) for hook in found) for words, found in hooks.items()}
    yield HOOKS, {words: [n for n in found if not n.startswith(LIBRARIES)] for words, found in names.items()}


def missing(owner: str, it: nn.Module | nn.Parameter, name: str, was: dict[str, Any]) -> list[str]:
    """What this run has otherwise than `was`, which `of` gave under this name, in words."""
    now, path = dict(of(it)).get(name, {}), owner.partition(" ")[2]
    differ = [key for key in {**was, **now} if was.get(key) != now.get(key)]
    if name == HOOKS:
        return [f"{words}s of {path or 'the module'}" for words in differ]
    return [f"{path}.{key}".lstrip(".") for key in differ]


def _class(layer: nn.Module | None) -> str:
    """As it was before FSDP made a class of its own of it."""
    return next(one.__qualname__ for one in type(layer).__mro__ if not one.__module__.startswith("torch.distributed."))


def _name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"
