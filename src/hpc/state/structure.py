"""The structure of a module besides weights and attributes: its layers, by their classes, and hooks, by their names.

A checkpoint holds none of these. Where training changes them, that is named at the first save.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker

from hpc.config.project import HPC

LAYERS, HOOKS = NAMES = " layers", " hooks"  # in place of an attribute's name, which has no space
LIBRARIES = ("torch.", "lightning.", "torchmetrics.", "deepspeed.", f"{HPC}.")
HOOK_KINDS = {  # the dicts in which torch keeps hooks of modules and parameters; it has no other way to list them
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
    "_post_accumulate_grad_hooks": "post-accumulate-grad hook",
}


def layers_and_hooks(owner: nn.Module | nn.Parameter) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield LAYERS with each layer's class, and HOOKS with the functions of each kind, without those of libraries."""
    if isinstance(owner, Metric | MetricTracker):  # the latter gets a further metric as each epoch begins
        return
    if isinstance(owner, nn.Module):
        yield LAYERS, {name: _class_name(layer) for name, layer in owner._modules.items()}
    hooks = {kind: (getattr(owner, key, None) or {}).values() for key, kind in HOOK_KINDS.items()}
    names = {kind: sorted(map(_function_name, functions)) for kind, functions in hooks.items()}
    yield (
        HOOKS,
        {kind: [name for name in all_names if not name.startswith(LIBRARIES)] for kind, all_names in names.items()},
    )


def _class_name(layer: nn.Module | None) -> str:
    """Return the name of a layer's class, without the subclass that FSDP makes of it."""
    classes = type(layer).__mro__
    return next(kind.__qualname__ for kind in classes if not kind.__module__.startswith("torch.distributed."))


def _function_name(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    function = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{function.__module__}.{function.__qualname__}"
