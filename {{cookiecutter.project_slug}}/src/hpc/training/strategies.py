"""The strategies, all of which keep and restore a run in the same way (kept.py); and what differs on CPU."""

import inspect
import os
from copy import deepcopy
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.distributed import all_reduce, broadcast, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from hpc.checkpoint import deepspeed_universal, safe_unpickle
from hpc.checkpoint.deepspeed_universal import TAG
from hpc.checkpoint.on_disk import read_manifest as read_manifest
from hpc.checkpoint.strategy_state import CheckpointMixin
from hpc.checkpoint.writer import NO_TIMEOUT
from hpc.config.errors import ConfigError
from hpc.data.shared_loaders import SharesData
from hpc.training import weight_averaging
from hpc.training.parallel import settle_buckets
from hpc.training.released_layers import FollowsReleased, shown
from hpc.training.synced_buffers import Followed

BATCH_NORM = nn.modules.batchnorm._BatchNorm  # the one class that all batch norms share


def outlast(hang_seconds: float) -> None:
    """Let the process groups made from now on wait longer than the watch does, which tells what each rank does.

    Torch's own limits are 10 and 30 minutes. Groups that libraries make, those of a mesh, say, take these defaults.
    """
    # The watchdog waits twice as long for the first step.
    limit = min(timedelta(seconds=2 * hang_seconds + 60), NO_TIMEOUT)
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        default = getattr(distributed_c10d, name)
        if default is not None:  # torch is built without NCCL
            setattr(distributed_c10d, name, max(default, limit))


# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
class Single(SharesData, CheckpointMixin, SingleDeviceStrategy):
    """One device."""


class SharesBuffers:
    """For a strategy of several ranks: one set of buffers (batch norm's statistics) where they count.

    Those that training may read become rank 0's before each step, as plain Lightning has it. The others, batch norm's,
    are each rank's own while it trains, and become rank 0's in an evaluation. A checkpoint holds one set of them,
    rank 0's, and what other ranks had beside: saving changes nothing.
    """

    lightning_module: Any
    shares_each_step = True
    _followed: Followed | None = None

    def __init__(self, **options: Any) -> None:
        # Lightning has read torch's default when it was imported, and passes it on.
        super().__init__(**{"timeout": distributed_c10d.default_pg_timeout} | options)

    def before_step(self) -> None:
        """Called on all ranks before each step of training."""
        if self.shares_each_step:
            self._followed = self._followed or Followed(self.lightning_module)
            self._followed.share()

    def on_validation_start(self) -> None:
        self.share_buffers()

    def on_test_start(self) -> None:
        self.share_buffers()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        own = self.share_buffers()
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
        _put_back(own)

    def own_buffers(self) -> dict[str, Tensor]:
        """Those of the module that are not as rank 0's are, by their names."""
        names = {id(buffer): name for name, buffer in self.lightning_module.named_buffers()}
        own = self.share_buffers()
        _put_back(own)
        return {names[id(buffer)]: value for buffer, value in own if id(buffer) in names}

    def share_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Rank 0's, on all ranks; those that have changed, and what they were."""
        own = []
        for buffer in (*self.lightning_module.buffers(), *weight_averaging.buffers(self.lightning_module.trainer)):
            if not isinstance(buffer, DTensor):  # whose ranks hold parts of it, or copies that stay alike
                before = buffer.clone()
                broadcast(buffer, 0)
                if not torch.equal(before, buffer):
                    own.append((buffer, before))
        return own


def _put_back(own: list[tuple[Tensor, Tensor]]) -> None:
    for buffer, value in own:
        buffer.copy_(value)


class DDP(FollowsReleased, SharesBuffers, SharesData, CheckpointMixin, DDPStrategy):
    """Every rank holds the whole model.

    Args:
        forward_sync_buffers: as in DistributedDataParallel; None: those that training may read, before each step.
    """

    def __init__(self, forward_sync_buffers: bool | None = None, **options: Any) -> None:
        new, old = "forward_sync_buffers", "broadcast_buffers"  # the same in older versions of torch
        known = inspect.signature(DistributedDataParallel).parameters
        super().__init__(**{new if new in known else old: bool(forward_sync_buffers)}, **options)
        self.shares_each_step = forward_sync_buffers is None

    def released(self, names: list[str]) -> None:
        if self.alone is None:
            return
        # DDP sums the gradients of what was trained when it was made.
        module, own = self.lightning_module, [(buffer, buffer.clone()) for buffer in self.lightning_module.buffers()]
        frozen = {name: weight for name, weight in module.named_parameters() if not weight.requires_grad}
        if self.model.find_unused_parameters:  # type: ignore[union-attr]
            again = [weight for name, weight in frozen.items() if name not in self.alone]  # it may be released again
        else:  # it would wait for gradients of these
            again, self.alone = [], self.alone | frozen
        self.model._remove_autograd_hooks()  # type: ignore[union-attr]  # nothing else takes them from the old one
        self.model = module
        for weight in again:
            weight.requires_grad = True
        self.configure_ddp()
        settle_buckets(module.trainer, module)
        for weight in again:
            weight.requires_grad = False
        with torch.no_grad():
            _put_back(own)  # DDP has sent rank 0's

    def post_backward(self, closure_loss: Tensor) -> None:
        """DDP knows nothing yet of what was released within this step."""
        for weight in self.trained_alone():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.detach()
            all_reduce(gradient)
            weight.grad = gradient / self.world_size
        super().post_backward(closure_loss)


class FSDP(FollowsReleased, SharesBuffers, SharesData, CheckpointMixin, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, as the module's `configure_model` does them."""

    @wraps(ModelParallelStrategy.__init__)  # what is typed is checked against its arguments
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        norms = (part for part in self.lightning_module.modules() if isinstance(part, BATCH_NORM))
        if trainer.precision == "bf16-mixed" and any(isinstance(norm.weight, DTensor) for norm in norms):
            _reject_two_precisions(self, "FSDP2 gathers the former in bf16")

    def released(self, names: list[str]) -> None:
        weights = dict(self.lightning_module.named_parameters())
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        updated = {id(weight) for group in groups for weight in group["params"]}  # not the networks within metrics
        alone = [name for name in names if id(weights[name]) in updated and not _is_sharded(weights[name])]
        if alone and self.distributed_sampler_kwargs["num_replicas"] > 1:
            rule = "with strategy=fsdp what is trained must be in a sharded part of the module: nobody averages the "
            rule += "gradients of others, and each rank would train them on its own samples"
            part, is_within, _ = alone[0].partition(".")
            place = f'fully_shard(self.{part}, mesh=self.device_mesh["data_parallel"]) in configure_model'
            place = place if is_within else f"{part} in a part of the module that configure_model shards"
            raise ConfigError("model", shown(alone), rule, f"{place}, or strategy=ddp")


class DeepSpeed(FollowsReleased, SharesBuffers, SharesData, CheckpointMixin, DeepSpeedStrategy):
    """ZeRO. On CPU the same, with the check for CUDA lifted: a laptop and the tests train with the real thing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Offloaded state is updated by the optimizer the config names. DeepSpeed's own CPU optimizer would be compiled
        # at first use, on a compute node.
        assert isinstance(self.config, dict)
        self.config["zero_force_ds_cpu_optimizer"] = False

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        optimizer = getattr(self.deepspeed_engine.optimizer, "optimizer", None)
        if isinstance(optimizer, torch.optim.Adagrad):  # it is another object than the one that schedules change
            rule = "schedules and parameter groups must have an effect; DeepSpeed replaces Adagrad by one of its own, "
            rule += "on which they have none"
            raise ConfigError("model.optimizer", "Adagrad", rule, "another optimizer, or strategy=ddp or fsdp")
        if any(map(_mixes_dtypes, self.lightning_module.modules())):
            _reject_two_precisions(self, "DeepSpeed keeps the latter in fp32")

    def released(self, names: list[str]) -> None:
        if self.alone is not None:  # ZeRO has shared out what was trained as training began
            rule = "DeepSpeed never trains what is frozen as training begins and released later"
            fix = "strategy=ddp or fsdp, or what is released later trained from the beginning"
            raise ConfigError("model", shown(names), rule, fix)

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            return super().setup_environment()
        # DeepSpeed reads this when it is first asked for its accelerator, and would otherwise look for a GPU.
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.ops

        # Its all-reduce through shared memory would be compiled at first use, and a job killed meanwhile would leave a
        # lock that hangs all later ones. gloo does as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed wants an index on each device; Lightning's CPU devices have none.
        self.parallel_devices = [torch.device("cpu", i) for i in range(self.num_processes)]
        return super(DeepSpeedStrategy, self).setup_environment()

    def _copy_tensors(self, checkpoint: dict[str, Any], part: Path) -> Any:
        """DeepSpeed's own files, from a copy of what it would have written while training waited."""
        from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

        copies: dict[str, Any] = {}

        class Copying(TorchCheckpointEngine):
            def save(self, state_dict: Any, path: str) -> None:
                copies[path] = copied(state_dict)

        for key in ("state_dict", "optimizer_states"):
            checkpoint.pop(key)
        self.deepspeed_engine.checkpoint_engine = Copying()
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
        return True  # its engine loads, which is made then

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        rest = self._read_rest(path)
        engine: Any = self.deepspeed_engine
        saved = read_manifest(path)
        note = saved.details if saved else {}
        if note.get("stage") != self._stage:
            deepspeed_universal.load_weights(engine, path)
            self._warn_of_fresh_optimizer(path)
            return rest
        if self._is_fitting and note["world_size"] != self.world_size:
            devices, ranks = self.lightning_module.trainer.num_devices, (note["world_size"], self.world_size)
            deepspeed_universal.reject_unmovable_states(note.get("states"), devices, ranks=ranks, checkpoint=path)
            deepspeed_universal.load_universal(engine, path)
        else:
            with safe_unpickle.reject_unsafe_pickles(path, "resume"), safe_unpickle.allow_deepspeed_classes():
                engine.load_checkpoint(
                    path, tag=TAG, load_optimizer_states=self._is_fitting, load_lr_scheduler_states=False
                )
        return rest


def _is_sharded(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names != ("tensor_parallel",)


def _mixes_dtypes(part: nn.Module) -> bool:
    if not isinstance(part, BATCH_NORM) or part.weight is None or part.running_mean is None:
        return False
    return part.weight.dtype != part.running_mean.dtype


def _reject_two_precisions(strategy: Any, why: str) -> None:
    if isinstance(strategy.accelerator, CPUAccelerator):
        rule = f"on CPU, batch norm must have weights and statistics of one precision; {why}"
        fix = "trainer.precision=32-true, or another norm, as torch.nn.GroupNorm"
        raise ConfigError("trainer.precision", strategy.precision_plugin.precision, rule, fix)


def copied(state: Any) -> Any:
    """Of what DeepSpeed saves: its tensors on the CPU, and everything else as it is now, fp16's loss scaler, say."""

    def copy(leaf: Any) -> Any:
        return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else deepcopy(leaf)

    return tree_map(copy, state, is_leaf=lambda node: isinstance(node, torch.Size))


def double(precision: str) -> list[DoublePrecision]:
    """`64-true` as a plugin; none for another precision. As a word Lightning rejects it for FSDP2, which can do it."""
    return [DoublePrecision()] if precision == "64-true" else []
