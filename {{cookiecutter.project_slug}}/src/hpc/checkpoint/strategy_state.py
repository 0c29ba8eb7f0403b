"""How every strategy keeps a run and restores it.

A checkpoint is a folder. For one device, DDP, FSDP2 and tensor parallelism the tensors in it are named as in the
network and cut as it suits whoever wrote them (torch.distributed.checkpoint), so any of these strategies goes on from
it, on any number of devices. DeepSpeed writes its own files. Everything else, plain data, lies in files beside them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
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
from hpc.checkpoint.writer import Writer

REST, RANK = "meta.pt", "rank-{}.pt"
# Keys of a checkpoint that are not for Lightning: each rank's own state, and what the manifest says.
MINE, NOTE, AFTERWARDS = "this_rank", "manifest", "afterwards"
VALIDATED = "validated"  # weights to be saved as the module's, where those have been averaged once more since
NEWER = "averaged_since"  # these, then


# pyright: reportIncompatibleMethodOverride=false, reportIncompatibleVariableOverride=false
# `Kept` names what it needs of the strategy it is mixed into, which has it as properties or as attributes.
class Kept:
    """For a strategy: saves without holding up the training for longer than a copy, and restores."""

    lightning_module: Any
    optimizers: Any
    broadcast: Any
    precision_plugin: Any
    global_rank: int
    world_size: int
    when_ended: Callable[[], object] = staticmethod(lambda: None)
    _writer: Writer | None = None
    _stager: BlockingAsyncStager | None = None
    _restored_from: Path | None = None
    _given: Mapping[str, Any] | None = MappingProxyType({})  # weights that are loaded, as hooks get them; None: not yet

    @property
    def writer(self) -> Writer:
        """Asked for by all ranks at the same time: it makes a process group."""
        if self._writer is None:
            self._writer = Writer()
        return self._writer

    @property
    def is_writing(self) -> bool:
        """Is a checkpoint being written by this rank?"""
        return self._writer is not None and self._writer.busy

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Copy the state and begin to write it; `writer.wait()` waits. Raises `Unwritten`."""
        final, mine, note, afterwards = self._opened(checkpoint, filepath)
        load_hooks.reject_saved(self.lightning_module.trainer, checkpoint["state_dict"])
        plain_data.leave_out_hparams(checkpoint)
        part = self.writer.begin(final)
        write = self._written(checkpoint, part)
        plain_data.reject_sharded(checkpoint)
        rest, own, rank = plain_data.to_bytes(checkpoint), plain_data.to_bytes(mine), self.global_rank

        def everything(part: Path) -> None:
            write(part)
            (part / RANK.format(rank)).write_bytes(own)
            if rank == 0:
                (part / REST).write_bytes(rest)

        self.writer.finish(part, final, note, everything, afterwards)
        if afterwards is None:  # asked for by the researcher, who expects it to be there now
            self.writer.wait()

    def _opened(self, checkpoint: dict[str, Any], filepath: Any) -> tuple[Path, Any, dict[str, Any], Any]:
        note = {"step": checkpoint["global_step"], "attempt": 0} | checkpoint.pop(NOTE, {})
        if VALIDATED in checkpoint:
            checkpoint[NEWER] = checkpoint["state_dict"]
            checkpoint["state_dict"] = checkpoint.pop(VALIDATED)
        note |= {"strategy": type(self).__name__, "world_size": self.world_size, **self._noted()}
        return Path(self.broadcast(filepath)), checkpoint.pop(MINE, {}), note, checkpoint.pop(AFTERWARDS, None)

    def _noted(self) -> dict[str, Any]:
        """What the manifest says besides."""
        return {}

    def _written(self, checkpoint: dict[str, Any], part: Path) -> Any:
        """Take the tensors out of the checkpoint; how their copy is written."""
        tensors: dict[str, Any] = {"state_dict": checkpoint.pop("state_dict")}
        others = []
        for number, saved in enumerate(checkpoint.pop("optimizer_states", [])):
            of_tensors, rest = optimizer_states.split(f"optimizer_{number}", saved)
            tensors |= of_tensors
            others.append(rest)
        checkpoint["optimizer_states"] = others
        if self._stager is None:
            self._stager = BlockingAsyncStager(cache_staged_state_dict=False)
        copied = self._stager.stage(tensors)
        group = self.writer.group

        def write(part: Path) -> None:
            save_tensors(copied, storage_writer=FileSystemWriter(part), process_group=group, no_dist=group is None)

        return write

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer_states.named(self.lightning_module, _plain(optimizer))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Only where it must be: a callback may need in `on_fit_start` what it had saved."""
        whole = isinstance(self, SingleDeviceStrategy | DDPStrategy) and not isinstance(self, DeepSpeedStrategy)
        return not whole  # DeepSpeed's is a DDPStrategy, too

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """The weights into the module, unless hooks see them before; the rest is returned. Raises `ConfigError`."""
        path = Path(checkpoint_path)
        rest = self._rest(path)
        if not (path / ".metadata").exists():  # DeepSpeed's
            weights.load(self.lightning_module, path)
            self._begins_anew(path)
            return rest | {"optimizer_states": []}
        self._restored_from = path
        if not self.restore_checkpoint_after_setup:  # Lightning converts to the run's precision only later
            self.precision_plugin.convert_module(self.lightning_module)
            if load_hooks.are_seen(self.lightning_module.trainer):
                self._given = None
                return {"state_dict": load_hooks.read(self.lightning_module, path)} | rest
        weights.reject_other_model(self.lightning_module, path)
        state = {"state_dict": get_model_state_dict(self.lightning_module)}
        with safe_unpickle.rejections(path, "resume"):
            load_tensors(state, storage_reader=Reader(path))
        set_model_state_dict(self.lightning_module, state["state_dict"])
        self._given = dict(state["state_dict"])
        return state | rest

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._restored_from is None:
            return
        for number, optimizer in enumerate(map(_plain, self.optimizers)):
            saved = checkpoint["optimizer_states"][number]
            name = f"optimizer_{number}"
            optimizer_states.restore(self.lightning_module, optimizer, name, saved, self._restored_from)

    def _begins_anew(self, path: Path) -> None:
        if self._fitting and self.global_rank == 0:
            said = f"{path}: weights go from one strategy to the other, the optimizer's state does not"
            print(f"warning: {said}", flush=True)

    def load_model_state_dict(self, checkpoint: dict[str, Any], strict: bool = True) -> None:
        """What the module's hook has left, where `load_checkpoint` has not done it. Raises `ConfigError`."""
        state = checkpoint.get("state_dict", {})
        if self._given is None:
            load_hooks.load(self.lightning_module, state)
        else:
            load_hooks.reject_loaded(self.lightning_module, self._given, state)
        self._given = MappingProxyType({})
        if NEWER in checkpoint:  # for callbacks that average weights
            checkpoint["state_dict"] = checkpoint.pop(NEWER)

    def _rest(self, path: Path) -> dict[str, Any]:
        """All but the tensors; under MINE what the rank of this number kept, if there was one. Raises `ConfigError`."""
        with safe_unpickle.rejections(path, "resume"):
            rest = torch.load(path / REST, weights_only=True, map_location="cpu")
        return rest | {MINE: own_state(path, self.global_rank)}

    @property
    def _fitting(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def on_train_end(self) -> None:
        """Called after the callbacks' and the module's own."""
        super().on_train_end()  # type: ignore[misc]
        self.when_ended()

    def teardown(self) -> None:
        if self._writer is not None:
            self._writer.drop()
            self._writer.wait()
        super().teardown()  # type: ignore[misc]


def own_state(path: Path, rank: int) -> dict[str, Any]:
    """What a rank kept for itself; {} if there was no such rank. Raises `ConfigError`."""
    own = path / RANK.format(rank)
    with safe_unpickle.rejections(own, "resume", only_this_rank=True):
        return torch.load(own, weights_only=True, map_location="cpu") if own.exists() else {}


def _plain(optimizer: Any) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
