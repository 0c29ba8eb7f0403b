"""DDP: every rank holds the whole model, and its gradients are averaged."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed import all_reduce
from torch.nn.parallel import DistributedDataParallel

from hpc.checkpoint.strategy_state import CheckpointMixin
from hpc.config.errors import ConfigError, join_names
from hpc.data.shared_loaders import ShardsDataLoaders
from hpc.privates.lightning import ddp_options
from hpc.privates.torch import GRADIENT_HOOKS, MODULE_HOOKS, has_gradient_hook, remove_ddp_hooks
from hpc.strategies.gradients import CompletesGradients
from hpc.strategies.lockstep import MeetsOtherRanks
from hpc.strategies.single import ParallelizesModule
from hpc.strategies.synced_buffers import SyncsBuffers
from hpc.strategies.unfrozen_parameters import TracksUnfrozenParameters
from hpc.strategies.unused_parameters import FindsUnusedParameters


# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
class DDP(
    ParallelizesModule,
    FindsUnusedParameters,
    TracksUnfrozenParameters,
    MeetsOtherRanks,
    SyncsBuffers,
    ShardsDataLoaders,
    CompletesGradients,
    CheckpointMixin,
    DDPStrategy,
):
    """Every rank holds the whole model."""

    def __init__(self, **options: Any) -> None:
        new, old = "forward_sync_buffers", "broadcast_buffers"  # older versions of torch have the old name
        names = inspect.signature(DistributedDataParallel).parameters
        super().__init__(**{new if new in names else old: False} | options)  # `SyncsBuffers` does it
        self._has_noted_hooks = False

    def state_to_save(self) -> dict[str, Any]:
        """Return what `load_state` gives to the strategy of a resumed run, before it wraps the module."""
        before = {"wrapped_before": self.wrapped_names, "frozen_before": self.frozen_to_save()}
        return {"unused": self.unused, **before}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Let DDP take up what it took care of when this was saved."""
        self.unused = state.get("unused")
        self.wrapped_before, self.frozen_before = state.get("wrapped_before", ()), state.get("frozen_before")

    def on_unfrozen(self, names: list[str]) -> None:
        """Wrap the module anew: DDP sums the gradients of those parameters that were trained when it was made."""
        if self.frozen is not None:
            self._wrap_again()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Let DDP look for unused parameters from the first step on before which one has been frozen."""
        self.note_unfrozen()  # wraps the module anew, so before this step decides who averages
        if self.unused is not None and (names := self.newly_frozen()):
            self.unused = names
            self._wrap_again()
        outputs = super().training_step(*args, **kwargs)
        if self.unused is not None and (names := self.newly_frozen()):
            rule = "With strategy=ddp, parameters must not be frozen within a training step, as DDP waits for their "
            rule += "gradients"
            fix = "requires_grad_(False) in on_train_batch_start, or +strategy.lightning.find_unused_parameters=true"
            raise ConfigError("model", join_names(names), rule, fix)
        return outputs

    def _wrap_again(self) -> None:
        """Wrap the module anew, as its parameters or the way in which DDP waits for them have changed."""
        module, was_frozen = self.lightning_module, self.frozen or {}
        self.meet_to_wrap()
        self.average_gradients(dict(module.named_parameters()))  # of batches that are accumulated; DDP forgets them
        frozen = {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}
        if self.unused or ddp_options(self).get("find_unused_parameters"):
            # DDP looks for those, and takes up what was trained before, as it may be released again.
            frozen_again = [parameter for name, parameter in frozen.items() if name not in was_frozen]
        else:  # DDP would wait for gradients of them
            frozen_again, self.frozen = [], was_frozen | frozen
        remove_ddp_hooks(self.model)  # type: ignore[arg-type]
        self.model = module
        for parameter in frozen_again:
            parameter.requires_grad = True
        ddp_options(self)["init_sync"] = (
            False  # a broadcast would replace buffers of metrics, which are each rank's own
        )
        self.configure_ddp()
        for parameter in frozen_again:
            parameter.requires_grad = False
        rebuild_ddp_buckets(module.trainer, module)

    def complete_gradients(self) -> None:
        """Average the gradients of parameters that were released within this step, of which DDP does not know yet."""
        for parameter in self.unfrozen_in_this_step():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            all_reduce(gradient)
            parameter.grad = gradient / self.world_size
        if not self._has_noted_hooks:
            self._has_noted_hooks = True
            self._note_gradient_hooks()
        super().complete_gradients()

    def _note_gradient_hooks(self) -> None:
        """Print which gradients the module changes or reads before they are averaged."""
        named = self.lightning_module.named_parameters()
        names = [name for name, p in named if has_gradient_hook(p)]
        if names and self.is_global_zero:
            note = (
                f"hooks of the gradients of {join_names(names)} get those of a rank's own samples, before DDP averages "
            )
            note += "them: what is no multiple of a gradient, such as a clamped one, is not that of one process"
            print(f"train: {note}", flush=True)


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
    forward = vars(module).get("forward")
    # Copies, as DDP has made those of batches that are accumulated views of its buckets, which the backward overwrites.
    gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
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
