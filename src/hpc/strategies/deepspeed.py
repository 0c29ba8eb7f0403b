"""ZeRO through DeepSpeed, on GPUs and, for a laptop and the tests, on CPU."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from hpc.checkpoint import deepspeed_universal, safe_unpickle
from hpc.checkpoint.deepspeed_universal import TAG
from hpc.checkpoint.on_disk import read_manifest
from hpc.checkpoint.strategy_state import CheckpointMixin
from hpc.config.errors import ConfigError, join_names
from hpc.data.shared_loaders import ShardsDataLoaders
from hpc.privates.torch import BatchNorm, tree_map
from hpc.strategies.lockstep import MeetsOtherRanks
from hpc.strategies.single import ParallelizesModule, reject_mixed_norm_on_cpu
from hpc.strategies.synced_buffers import SyncsBuffers
from hpc.strategies.unfrozen_parameters import TracksUnfrozenParameters


# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
class DeepSpeed(
    ParallelizesModule,
    TracksUnfrozenParameters,
    MeetsOtherRanks,
    SyncsBuffers,
    ShardsDataLoaders,
    CheckpointMixin,
    DeepSpeedStrategy,
):
    """ZeRO stages 1 to 3. On CPU it is the same, with the check for CUDA lifted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # The optimizer that the config names updates offloaded state, too. DeepSpeed's own CPU optimizer would be
        # compiled at first use, on a compute node.
        assert isinstance(self.config, dict)
        self.config["zero_force_ds_cpu_optimizer"] = False

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        optimizer = getattr(self.deepspeed_engine.optimizer, "optimizer", None)
        if isinstance(optimizer, torch.optim.Adagrad):  # not the object whose learning rate schedules change
            rule = (
                "DeepSpeed replaces Adagrad by an optimizer of its own, on which schedules and parameter groups have "
            )
            rule += "no effect"
            raise ConfigError("model.optimizer", "Adagrad", rule, "another optimizer, or strategy=ddp or fsdp")
        if any(map(_mixes_dtypes, self.lightning_module.modules())):
            reject_mixed_norm_on_cpu(self, reason="DeepSpeed keeps the statistics in fp32")

    def on_unfrozen(self, names: list[str]) -> None:
        if self.frozen is not None:  # ZeRO has shared out the parameters that were trained when training started
            rule = "DeepSpeed never trains parameters that are frozen when training starts and released later"
            fix = "strategy=ddp or fsdp, or train them from the beginning"
            raise ConfigError("model", join_names(names), rule, fix)

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            return super().setup_environment()
        # DeepSpeed reads this when it is first asked for its accelerator, and would otherwise look for a GPU.
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.ops

        # DeepSpeed's all-reduce through shared memory would be compiled at first use. A job that is killed meanwhile
        # would leave a lock that hangs all later ones, and gloo is as good.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed needs an index on each device; Lightning's CPU devices have none.
        self.parallel_devices = [torch.device("cpu", i) for i in range(self.num_processes)]
        return super(DeepSpeedStrategy, self).setup_environment()

    def _copy_tensors(self, checkpoint: dict[str, Any], part: Path) -> Any:
        """Copy what DeepSpeed would write while training waits; return a function that writes its files later."""
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        copies: dict[str, Any] = {}

        class CopyingEngine(TorchCheckpointEngine):
            def save(self, state_dict: Any, path: str) -> None:
                copies[path] = copy_to_cpu(state_dict)

        for key in ("state_dict", "optimizer_states"):
            checkpoint.pop(key)
        self.deepspeed_engine.checkpoint_engine = CopyingEngine()
        self.deepspeed_engine.save_checkpoint(part, tag=TAG, save_latest=False)

        def write(part: Path) -> None:
            for path, state in copies.items():
                torch.save(state, path)

        return write

    def _manifest_details(self) -> dict[str, Any]:
        return {"stage": self._stage, "states": deepspeed_universal.optimizer_state_names(self.deepspeed_engine)}

    @property
    def _stage(self) -> int:
        return self.config["zero_optimization"]["stage"]  # type: ignore[index]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # the engine that loads is made in setup

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        rest = self._read_non_tensor_state(path)
        engine: Any = self.deepspeed_engine
        manifest = read_manifest(path)
        details = manifest.details if manifest else {}
        if details.get("stage") != self._stage:
            deepspeed_universal.load_weights(engine, path)
            self._warn_of_fresh_optimizer(path)
            return rest
        if self._is_fitting and details["world_size"] != self.world_size:
            deepspeed_universal.reject_unconvertible_states(
                details.get("states"),
                self.lightning_module.trainer.num_devices,
                num_ranks_saved=details["world_size"],
                num_ranks=self.world_size,
                checkpoint=path,
            )
            deepspeed_universal.load_universal(engine, path)
        else:
            with safe_unpickle.convert_unpickling_errors(path, "resume"), safe_unpickle.allow_deepspeed_classes():
                engine.load_checkpoint(
                    path, tag=TAG, load_optimizer_states=self._is_fitting, load_lr_scheduler_states=False
                )
        return rest


def _mixes_dtypes(part: nn.Module) -> bool:
    """Return whether a part is a batch norm with weights and statistics of different precisions."""
    if not isinstance(part, BatchNorm) or part.weight is None or part.running_mean is None:
        return False
    return part.weight.dtype != part.running_mean.dtype


def copy_to_cpu(state: Any) -> Any:
    """Copy what DeepSpeed saves: tensors to the CPU, and everything else as it is now, such as fp16's loss scaler."""

    def copy(leaf: Any) -> Any:
        return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else deepcopy(leaf)

    return tree_map(copy, state, is_leaf=lambda node: isinstance(node, torch.Size))
