"""FSDP2 and tensor parallelism: ranks hold shards of each parameter."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed import all_reduce
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpc.checkpoint.strategy_state import CheckpointMixin
from hpc.config.errors import ConfigError, join_names
from hpc.data.shared_loaders import ShardsDataLoaders
from hpc.privates.torch import BatchNorm
from hpc.strategies.gathering import is_running, parts_with_parameters, reshard
from hpc.strategies.gradients import CompletesGradients
from hpc.strategies.lockstep import MeetsOtherRanks
from hpc.strategies.sharded_tensors import is_sharded
from hpc.strategies.single import ParallelizesModule, reject_mixed_norm_on_cpu
from hpc.strategies.synced_buffers import SyncsBuffers
from hpc.strategies.unfrozen_parameters import TracksUnfrozenParameters


# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
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
        norms = (part for part in self.lightning_module.modules() if isinstance(part, BatchNorm))
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
