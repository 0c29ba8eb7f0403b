"""The strategies except DeepSpeed. All save and restore a run in the same way (checkpoint/strategy_state.py)."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed import all_reduce, distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpc.checkpoint.strategy_state import CheckpointMixin
from hpc.config.errors import ConfigError
from hpc.data.shared_loaders import ShardsDataLoaders
from hpc.training.common_steps import MeetsOtherRanks
from hpc.training.ddp_buckets import rebuild_ddp_buckets
from hpc.training.parallelize import ModuleChanges, parallelize, parts_with_parameters
from hpc.training.rank_gradients import CompletesGradients
from hpc.training.sharded_parameters import Gathers, is_running, reshard
from hpc.training.sharded_tensors import is_sharded
from hpc.training.shown_names import join_names
from hpc.training.synced_buffers import SyncsBuffers, put_back
from hpc.training.unfrozen_parameters import TracksUnfrozenParameters
from hpc.training.unused_parameters import FindsUnusedParameters

BATCH_NORM = nn.modules.batchnorm._BatchNorm  # the one class that all batch norms share
GROUP_TIMEOUT = timedelta(days=24)  # about the longest whose milliseconds torch can count


def extend_group_timeouts() -> None:
    """Let process groups wait from now on until the watchdog ends the ranks, which says where each of them waits.

    Torch's own limits, 10 and 30 minutes, run on while a job is suspended. Groups that libraries make, such as those of
    a mesh, take these defaults.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        if getattr(distributed_c10d, name) is not None:  # None: torch was built without NCCL
            setattr(distributed_c10d, name, GROUP_TIMEOUT)


class ParallelizesModule:
    """Mixin for strategies: changes the module as the section `strategy` of the config says, before it is set up."""

    lightning_module: Any
    changes = ModuleChanges()
    gathers: Gathers | None = None

    def setup(self, trainer: Any) -> None:
        mesh = getattr(self, "_device_mesh", None)
        options = {"meet_to_read": self.meet_to_read} if isinstance(self, MeetsOtherRanks) else {}
        self.gathers = parallelize(self.lightning_module, mesh, self.changes, **options) or self.gathers
        super().setup(trainer)  # type: ignore[misc]


# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
class Single(ParallelizesModule, ShardsDataLoaders, CheckpointMixin, SingleDeviceStrategy):
    """One device."""


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
    """Every rank holds the whole model.

    Args:
        forward_sync_buffers: as in DistributedDataParallel; None: only buffers that training may read are synced.
    """

    def __init__(self, forward_sync_buffers: bool | None = None, **options: Any) -> None:
        new, old = "forward_sync_buffers", "broadcast_buffers"  # older versions of torch have the old name
        names = inspect.signature(DistributedDataParallel).parameters
        super().__init__(**{new if new in names else old: bool(forward_sync_buffers)}, **options)
        self._has_noted_hooks = False
        self.syncs_each_step = forward_sync_buffers is None

    def on_unfrozen(self, names: list[str]) -> None:
        """Wrap the module anew: DDP sums the gradients of those parameters that were trained when it was made."""
        if self.frozen is not None:
            self._wrap_again()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Let DDP look for unused parameters from the first step on before which one has been frozen."""
        self._register_unfrozen(self.frozen or {})  # wraps the module anew, so before this step decides who averages
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
        if self.unused or self._ddp_kwargs.get("find_unused_parameters"):
            # DDP looks for those, and takes up what was trained before, as it may be released again.
            frozen_again = [parameter for name, parameter in frozen.items() if name not in was_frozen]
        else:  # DDP would wait for gradients of them
            frozen_again, self.frozen = [], was_frozen | frozen
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        self.model._remove_autograd_hooks()  # type: ignore[union-attr]  # nothing else removes those of the old DDP
        self.model = module
        for parameter in frozen_again:
            parameter.requires_grad = True
        self.configure_ddp()
        for parameter in frozen_again:
            parameter.requires_grad = False
        rebuild_ddp_buckets(module.trainer, module)
        with torch.no_grad():
            put_back(buffers)  # DDP has broadcast rank 0's

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
        names = [name for name, p in named if p._backward_hooks or p._post_accumulate_grad_hooks]
        if names and self.is_global_zero:
            note = (
                f"hooks of the gradients of {join_names(names)} get those of a rank's own samples, before DDP averages "
            )
            note += "them: what is no multiple of a gradient, such as a clamped one, is not that of one process"
            print(f"train: {note}", flush=True)


class FSDP(
    ParallelizesModule,
    TracksUnfrozenParameters,
    MeetsOtherRanks,
    SyncsBuffers,
    ShardsDataLoaders,
    CompletesGradients,
    CheckpointMixin,
    ModelParallelStrategy,
):
    """FSDP2 and tensor parallelism of any module; one whose `configure_model` shards it stays as that does it."""

    _is_in_step = _meets_in_forward = False

    @wraps(ModelParallelStrategy.__init__)  # overrides are checked against its arguments
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def setup(self, trainer: Any) -> None:
        self._marks = {name: dict(vars(parameter)) for name, parameter in self.lightning_module.named_parameters()}
        with _configure_model_overridden(self.lightning_module):
            super().setup(trainer)
        if not self._meets_in_forward:
            self._meets_in_forward = True
            module: nn.Module = self.lightning_module
            parts: list[nn.Module] = [part for part in module.modules() if isinstance(part, FSDPModule)]
            for part in [*parts, *(parts_with_parameters(module) if isinstance(module, FSDPModule) else ())]:
                part.register_forward_pre_hook(self._before_forward, prepend=True)
        norms = (part for part in self.lightning_module.modules() if isinstance(part, BATCH_NORM))
        if trainer.precision == "bf16-mixed" and any(isinstance(norm.weight, DTensor) for norm in norms):
            reject_mixed_norm_on_cpu(self, reason="FSDP2 gathers the weights in bf16")

    def setup_optimizers(self, trainer: Any) -> None:
        for name, parameter in self.lightning_module.named_parameters():
            # Marks such as `weight._no_weight_decay = True` decide about groups. Sharding makes new parameters.
            vars(parameter).update(self._marks.get(name, {}) | vars(parameter))
        super().setup_optimizers(trainer)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step():
            output = super().training_step(*args, **kwargs)
        if output is None:  # no backward follows, after which FSDP would do it
            reshard(self.lightning_module)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step(is_evaluation=True):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step(is_evaluation=True):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step(is_evaluation=True):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _step(self, is_evaluation: bool = False) -> Iterator[None]:
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
        if is_evaluation:  # hooks find shards: a change in the whole copy that is left would be lost
            reshard(self.lightning_module)

    def _before_forward(self, part: Any, inputs: Any) -> None:
        """Meet the other ranks before a forward outside of steps. Called before each forward of a sharded part."""
        sharded = part if isinstance(part, FSDPModule) else self.lightning_module
        if not self._is_in_step and not is_running(sharded):
            self.meet_to_run()

    def complete_gradients(self) -> None:
        """Average the gradients of parameters without dimensions, which FSDP cannot shard."""
        scalars = [p for p in self.lightning_module.parameters() if p.dim() == 0 and p.grad is not None]
        if scalars:
            group, gradients = self.device_mesh["data_parallel"].get_group(), torch.stack([p.grad for p in scalars])  # type: ignore[misc]
            all_reduce(gradients, group=group)
            for parameter, gradient in zip(scalars, gradients / group.size(), strict=True):
                parameter.grad.copy_(gradient)  # type: ignore[union-attr]
        super().complete_gradients()

    def on_unfrozen(self, names: list[str]) -> None:
        """Reject trained parameters outside of sharded parts if several ranks get different samples."""
        parameters = dict(self.lightning_module.named_parameters())
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        updated = {id(parameter) for group in groups for parameter in group["params"]}  # not networks within metrics
        parts = {name for name in names if id(parameters[name]) in updated and parameters[name].dim()}
        unsharded = [name for name in names if name in parts and not is_sharded(parameters[name])]
        if unsharded and self.distributed_sampler_kwargs["num_replicas"] > 1:
            rule = "With strategy=fsdp, each trained parameter must lie in a sharded part of the module. Gradients of "
            rule += "others are not averaged, so each rank would train them on its own samples"
            part, has_part, _ = unsharded[0].partition(".")
            fix = f"{part} in a part of the module with a forward of its own"
            if has_part:
                fix = f'fully_shard(self.{part}, mesh=self.device_mesh["data_parallel"]) in configure_model'
            raise ConfigError("model", join_names(unsharded), rule, f"{fix}, or strategy=ddp")


@contextmanager
def _configure_model_overridden(module: Any) -> Iterator[None]:
    """Let Lightning believe that the module has a `configure_model` in which it shards itself; it requires one."""
    if is_overridden("configure_model", module):
        yield
        return
    module.configure_model = lambda: None
    try:
        yield
    finally:
        del module.configure_model


def double_precision_plugins(precision: str) -> list[DoublePrecision]:
    """Return the plugin for `64-true`, else none. Lightning rejects the word for FSDP2, though FSDP2 can do it."""
    return [DoublePrecision()] if precision == "64-true" else []


def reject_mixed_norm_on_cpu(strategy: Any, *, reason: str) -> None:
    """Raise `ConfigError` on CPU, which has no kernel for a batch norm of two precisions.

    Args:
        reason: why weights and statistics have different precisions.
    """
    if isinstance(strategy.accelerator, CPUAccelerator):
        rule = f"On CPU, the weights and statistics of batch norm must have one precision; {reason}"
        fix = "trainer.precision=32-true, or another norm such as torch.nn.GroupNorm"
        raise ConfigError("trainer.precision", strategy.precision_plugin.precision, rule, fix)
