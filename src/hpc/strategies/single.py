"""One device, and what all strategies share. All save and restore a run alike (checkpoint/strategy_state.py)."""

from datetime import timedelta
from typing import Any

from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed import distributed_c10d

from hpc.checkpoint.strategy_state import CheckpointMixin
from hpc.config.errors import ConfigError
from hpc.data.shared_loaders import ShardsDataLoaders
from hpc.privates.lightning import device_mesh
from hpc.strategies.lockstep import MeetsOtherRanks
from hpc.strategies.parallelize import ModuleChanges, parallelize
from hpc.strategies.sharded_parameters import Gathers

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
        mesh = device_mesh(self)
        options = {"meet_to_read": self.meet_to_read} if isinstance(self, MeetsOtherRanks) else {}
        self.gathers = parallelize(self.lightning_module, mesh, self.changes, **options) or self.gathers
        super().setup(trainer)  # type: ignore[misc]


# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
class Single(ParallelizesModule, ShardsDataLoaders, CheckpointMixin, SingleDeviceStrategy):
    """One device."""


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
