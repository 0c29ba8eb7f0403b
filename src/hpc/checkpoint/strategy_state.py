"""Saving and restoring of a run, for every strategy.

A checkpoint is a folder. For one device, DDP, FSDP2 and tensor parallelism the tensors in it are named as in the
network and cut as it suits the strategy that wrote them (torch.distributed.checkpoint), so any of these strategies
resumes from it, on any number of devices. DeepSpeed writes its own files. All else is plain data in files beside them.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from hpc.checkpoint import load_hooks, optimizer_states, plain_data, safe_unpickle, weights
from hpc.checkpoint.safe_unpickle import Reader
from hpc.checkpoint.writer import CheckpointNotWritten, CheckpointWriter

RANK_FILE = "rank-{}.pt"
# Keys of a checkpoint that are not for Lightning.
RANK_STATE = "this_rank"  # the state of this rank alone
MANIFEST_KEY = "manifest"  # entries of the manifest
ON_PUBLISHED = "afterwards"  # called with the folder when the checkpoint is whole
# The weights that were validated; saved in place of the module's if the average was updated since.
VALIDATED_WEIGHTS = "validated"
NEWER_WEIGHTS = "averaged_since"  # the module's own weights then


# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# The mixin names what it needs of the strategy it is mixed into, which has it as properties or as attributes.
class CheckpointMixin:
    """Mixin for a strategy: save without blocking training for longer than a copy takes, and restore.

    Attributes:
        after_train_start, after_train_end: called when the callbacks' and the module's own hooks of that name are done.
        references: of values of the environment, which may be secrets, and are saved by name only.
    """

    lightning_module: Any
    optimizers: Any
    lr_scheduler_configs: Any
    broadcast: Any
    precision_plugin: Any
    global_rank: int
    world_size: int
    after_train_start: Callable[[], object] = staticmethod(lambda: None)
    after_train_end: Callable[[], object] = staticmethod(lambda: None)
    references: Mapping[str, str] = MappingProxyType({})
    _writer: CheckpointWriter | None = None
    _stager: BlockingAsyncStager | None = None
    _restored_from: Path | None = None
    # The weights that were loaded, as the hooks of the researcher's get them; None: the hooks come first.
    _loaded_weights: Mapping[str, Any] | None = MappingProxyType({})

    @property
    def writer(self) -> CheckpointWriter:
        """The writer of this rank. All ranks ask for it at the same time: it makes a process group."""
        if self._writer is None:
            self._writer = CheckpointWriter()
        return self._writer

    @property
    def is_writing(self) -> bool:
        """Return True while this rank is writing a checkpoint."""
        return self._writer is not None and self._writer.is_busy

    # Saving

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Copy the state and start to write it; `writer.wait()` waits. Raises `CheckpointNotWritten`."""
        details = {"step": checkpoint["global_step"], "attempt": 0} | checkpoint.pop(MANIFEST_KEY, {})
        if VALIDATED_WEIGHTS in checkpoint:
            checkpoint[NEWER_WEIGHTS] = checkpoint["state_dict"]
            checkpoint["state_dict"] = checkpoint.pop(VALIDATED_WEIGHTS)
        details |= {"strategy": type(self).__name__, "world_size": self.world_size, **self._manifest_details()}
        final, on_published = Path(self.broadcast(filepath)), checkpoint.pop(ON_PUBLISHED, None)
        rank, rank_state = self.global_rank, checkpoint.pop(RANK_STATE, {})
        load_hooks.reject_weights_replaced_on_save(self.lightning_module.trainer, checkpoint["state_dict"])
        plain_data.make_hparams_savable(checkpoint, self.references)
        part = self.writer.prepare_folder(final)
        write_tensors = self._copy_tensors(checkpoint, part)
        plain_data.reject_sharded_tensors(checkpoint)
        rest_bytes, rank_bytes = plain_data.to_bytes(checkpoint), plain_data.to_bytes(rank_state)

        def write(part: Path) -> None:
            write_tensors(part)
            (part / RANK_FILE.format(rank)).write_bytes(rank_bytes)
            if rank == 0:
                (part / load_hooks.REST_FILE).write_bytes(rest_bytes)

        self.writer.start_write(part, final, details=details, write=write, on_published=on_published)
        if on_published is None:  # requested by the researcher, who expects it to be complete now
            self.writer.wait()

    def _manifest_details(self) -> dict[str, Any]:
        """Return further entries of the manifest."""
        return {}

    def _copy_tensors(self, checkpoint: dict[str, Any], part: Path) -> Callable[[Path], None]:
        """Take the tensors out of the checkpoint, and return a function that writes their copy into a folder."""
        tensors: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
        states_without_tensors = []
        for number, saved in enumerate(checkpoint.pop("optimizer_states", [])):
            state_tensors, rest = optimizer_states.split_tensors(f"optimizer_{number}", saved)
            tensors |= state_tensors
            states_without_tensors.append(rest)
        checkpoint["optimizer_states"] = states_without_tensors
        if self._stager is None:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=False)
        copy = self._stager.stage(tensors)
        group = self.writer.group

        def write(part: Path) -> None:
            save_tensors(copy, storage_writer=FileSystemWriter(part), process_group=group, no_dist=group is None)

        return write

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_states.state_by_name(self.lightning_module, _unwrapped(optimizer))

    # Restoring

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Return True if Lightning restores after setup: only for sharded models and DeepSpeed.

        Otherwise earlier, as callbacks may need their state in `on_fit_start`.
        """
        is_replicated = isinstance(self, SingleDeviceStrategy | DDPStrategy)
        return not is_replicated or isinstance(self, DeepSpeedStrategy)  # which is a DDPStrategy, too

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the weights into the module, unless hooks see them before, and return the rest. Raises `ConfigError`."""
        path = Path(checkpoint_path)
        rest = self._read_non_tensor_state(path)
        if not (path / ".metadata").exists():  # written by DeepSpeed
            weights.load(self.lightning_module, path)
            self._warn_of_fresh_optimizer(path)
            return rest | {"optimizer_states": []}
        self._restored_from = path
        if not self.restore_checkpoint_after_setup:  # Lightning converts to the run's precision only later
            self.precision_plugin.convert_module(self.lightning_module)
            if load_hooks.has_load_hooks(self.lightning_module.trainer):
                self._loaded_weights = None
                return {"state_dict": load_hooks.read_weights(self.lightning_module, path)} | rest
        weights.reject_other_model(self.lightning_module, path)
        state = {"state_dict": get_model_state_dict(self.lightning_module)}
        with safe_unpickle.convert_unpickling_errors(path, "resume"):
            load_tensors(state, storage_reader=Reader(path))
        set_model_state_dict(self.lightning_module, state["state_dict"])
        self._loaded_weights = dict(state["state_dict"])
        return state | rest

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """Load what the hooks have left, if `load_checkpoint` has not loaded the weights. Raises `ConfigError`."""
        state = checkpoint.get("state_dict", {})
        if self._loaded_weights is None:
            load_hooks.load_weights(self.lightning_module, state)
        else:
            load_hooks.reject_weights_replaced_on_load(self.lightning_module, self._loaded_weights, state)
        self._loaded_weights = MappingProxyType({})
        if NEWER_WEIGHTS in checkpoint:  # for callbacks that average weights
            checkpoint["state_dict"] = checkpoint.pop(NEWER_WEIGHTS)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._restored_from is None:
            return
        path = self._restored_from
        for number, optimizer in enumerate(map(_unwrapped, self.optimizers)):
            name, saved = f"optimizer_{number}", checkpoint["optimizer_states"][number]
            optimizer_states.restore(self.lightning_module, optimizer, name=name, saved=saved, path=path)
            pairs = zip(self.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=False)
            schedules = [state for config, state in pairs if config.scheduler.optimizer is optimizer]
            lists = [checkpoint["scheduled"][number], *optimizer_states.lists_of_groups(schedules)]
            optimizer_states.match_groups(lists, self.lightning_module, optimizer, saved=saved)

    def _read_non_tensor_state(self, path: Path) -> dict[str, Any]:
        """Return all but the tensors; the rank's own state, if there is one, under RANK_STATE. Raises `ConfigError`."""
        with safe_unpickle.convert_unpickling_errors(path, "resume"):
            rest = safe_unpickle.load_saved(path / load_hooks.REST_FILE)
        return rest | {RANK_STATE: read_rank_state(path, self.global_rank)}

    def _warn_of_fresh_optimizer(self, path: Path) -> None:
        if self._is_fitting and self.global_rank == 0:
            text = f"the optimizer starts anew: its state in {path} is of another strategy, which shares only weights"
            print(f"warning: {text}", flush=True)

    @property
    def _is_fitting(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    # The start and the end of training

    def on_train_start(self) -> None:
        """Called after the callbacks' and the module's own."""
        super().on_train_start()  # type: ignore[misc]
        self.after_train_start()

    def on_train_end(self) -> None:
        """Called after the callbacks' and the module's own."""
        super().on_train_end()  # type: ignore[misc]
        self.after_train_end()

    def teardown(self) -> None:
        if self._writer is not None:
            self._writer.discard_deferred_write()
            # After an error this rank has given up its claim, so that what is being written is not published.
            with suppress(CheckpointNotWritten) if sys.exc_info()[0] else nullcontext():
                self._writer.wait()
        super().teardown()  # type: ignore[misc]


def read_rank_state(path: Path, rank: int) -> dict[str, Any]:
    """Return the state that a rank saved for itself; {} if there was no such rank. Raises `ConfigError`."""
    file = path / RANK_FILE.format(rank)
    with safe_unpickle.convert_unpickling_errors(file, "resume", only_this_rank=True):
        return safe_unpickle.load_saved(file) if file.exists() else {}


def _unwrapped(optimizer: Any) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
