"""When FSDP2 gathers the parameters beside the blocks: for a whole step, or for a part that a hook runs by itself."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torchmetrics import Metric

from hpc.privates.torch import forward_hooks, is_in_backward
from hpc.privates.torch_sharding import begin_forward, end_forward, is_fsdp_hook, is_in_forward

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def gather_for_steps(module: Any) -> None:
    """Let FSDP gather the parameters for a whole step.

    The module's own forward is then a plain call within a step: FSDP would gather once more for it in backward.
    """
    steps_begun: list[str] = []

    def outside_steps(hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if steps_begun else hook(*args, **kwargs)

    for hooks in forward_hooks(module):
        hooks.update({key: outside_steps(hook) for key, hook in hooks.items() if is_fsdp_hook(hook)})
    for name in STEPS:
        if is_overridden(name, module):
            setattr(module, name, _noted(getattr(module, name), name, steps_begun))
            register_fsdp_forward_method(module, name)
    module.register_forward_hook(lambda *_: None if steps_begun else reshard(module))
    for part in parts_with_parameters(module):
        _gather_when_run(part, module, is_in_step=lambda: bool(steps_begun))


def _noted(step: Callable[..., Any], name: str, begun: list[str]) -> Callable[..., Any]:
    @wraps(step)
    def call(*args: Any, **kwargs: Any) -> Any:
        begun.append(name)
        try:
            return step(*args, **kwargs)
        finally:
            begun.pop()

    return call


def _gather_when_run(part: nn.Module, module: Any, *, is_in_step: Callable[[], bool]) -> None:
    """Gather what `module` shards beside its blocks, of which `part` has some, when a hook runs the part by itself."""
    begun: list[bool] = []

    def begin(_: nn.Module, args: Any, kwargs: Any) -> Any:
        begun.append(not is_in_step() and not is_running(module))
        return begin_forward(module, args, kwargs) if begun[-1] else None

    def end(_: nn.Module, args: Any, output: Any) -> Any:
        if not begun.pop():
            return None
        output = end_forward(module, args, output)
        reshard(module)
        return output

    part.register_forward_pre_hook(begin, with_kwargs=True)
    part.register_forward_hook(end, always_call=True)


def reshard(module: nn.Module) -> None:
    """Put the shards in the place of gathered parameters, of which FSDP leaves some if no backward follows."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def is_running(module: Any) -> bool:
    """Return whether a sharded module is already in a forward, its own or that of a part around it, or in backward."""
    return is_in_forward(module) or is_in_backward()


def parts_with_parameters(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost parts that can run by themselves: a list of modules has no forward, its items do."""
    for part in module.children():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            yield from parts_with_parameters(part)
        elif not isinstance(part, Metric | FSDPModule) and next(part.parameters(), None) is not None:
            yield part
