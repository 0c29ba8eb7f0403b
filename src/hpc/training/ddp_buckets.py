"""Let DDP choose its gradient buckets before the first step, so that a resumed run sums in the same order."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Where torch keeps the hooks of forward and backward, and those of gradients; there is no public way to suspend them.
MODULE_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def rebuild_ddp_buckets(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Let DDP rebuild the buckets that it sums gradients in, by one backward whose gradients are thrown away.

    DDP rebuilds its buckets after the first backward. Without this, a resumed run would sum its first step in another
    order than the run that it continues. The module's own forward and hooks are not called: they may draw random
    numbers, count, or set themselves up from the first batch that they see.
    """
    ddp: Any = trainer.strategy.model
    if not isinstance(ddp, DistributedDataParallel):
        return
    parameters = trainer.strategy.wrapped  # type: ignore[attr-defined]
    frozen_again = [parameter for parameter in parameters if not parameter.requires_grad]
    buffers, forward = [buffer.clone() for buffer in module.buffers()], vars(module).get("forward")
    gradients = [parameter.grad for parameter in parameters]
    ddp.zero_grad(set_to_none=True)
    for parameter in frozen_again:
        parameter.requires_grad = True
    module.forward = lambda: sum(0 * parameter.sum() for parameter in parameters)  # type: ignore[assignment]
    try:
        with _hooks_suspended(module, parameters):
            ddp().backward()
    finally:
        del module.forward
        vars(module).update({"forward": forward} if forward else {})
    for parameter in frozen_again:
        parameter.requires_grad = False
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    with torch.no_grad():  # DDP has broadcast rank 0's buffers
        for buffer, value in zip(module.buffers(), buffers, strict=True):
            buffer.copy_(value)


@contextmanager
def _hooks_suspended(module: nn.Module, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Remove the hooks of the module itself and of its parameters; one of them may be an optimizer's step."""
    hooks = [getattr(module, name) for name in MODULE_HOOKS]
    hooks += [getattr(parameter, name) or {} for parameter in parameters for name in GRADIENT_HOOKS]
    copies = [dict(registered) for registered in hooks]
    for registered in hooks:
        registered.clear()
    try:
        yield
    finally:
        for registered, copy in zip(hooks, copies, strict=True):
            registered.update(copy)
