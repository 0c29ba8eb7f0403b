"""A researcher's own loaders, shared out among ranks: each rank gets different samples, and no sample comes twice.

The order of a loader over a map-style dataset is cut into parts (`map_loaders`); a stream is shared out sample by
sample (`stream_loader`). Whatever changes is printed once.
"""

from contextlib import ExitStack
from itertools import product
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from hpc.config.errors import ConfigError
from hpc.data.even_batches import EvenBatches
from hpc.data.loader_agreement import extremes
from hpc.data.loader_making import MAX_ENTRIES
from hpc.data.map_loaders import loader_error, share_loader
from hpc.data.rank_steps import RankSteps, data_rank_and_size, run_seed
from hpc.data.sample_order import order_of
from hpc.data.stream_loader import StreamLoader, is_map_style
from hpc.data.without_trace import without_trace
from hpc.state.batch_effects import AttributeEffects

BATCH_HOOKS = [f"on_{step}_batch_{when}" for step in ("validation", "test", "predict") for when in ("start", "end")]
OWN_PACKAGES = ("hpc.", "lightning.", "pytorch_lightning.")  # their callbacks show progress, and count no samples


class ShardsDataLoaders(RankSteps):
    """A mixin for strategies that shares out the loaders that Lightning passes to them."""

    lightning_module: Any
    stream_splits: str | None = None  # data.stream_splits
    _printed_notes: tuple[str, ...] = ()
    _has_checked_test_loaders = False
    host_group: Any = None  # of all ranks; made when it is needed first
    is_computing_along = False  # this rank has no batch of its own left in an evaluation
    _skipped_hooks = ExitStack()

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        is_single_process, stage = trainer.world_size == 1, trainer.state.stage
        place = data_rank_and_size(self)
        loader, note = shard_dataloader(
            dataloader, stage, is_single_process=is_single_process, stream_splits=self.stream_splits, **place
        )
        if not is_single_process:
            self.host_group = self.host_group or dist.new_group(backend="gloo")
            if extremes(int(may_be_uneven(loader)), self.host_group)[1]:  # on any rank, as their datasets may differ
                loader = EvenBatches(loader, group=self.host_group, repeats_last=stage != RunningStage.TRAINING)
        data = getattr(trainer, "datamodule", None)
        has_test = data is not None and trainer.limit_test_batches and not self._has_checked_test_loaders
        if stage == RunningStage.TRAINING and not is_single_process and has_test:
            self._check_test_loaders(trainer)
        self._print_once(note, trainer)
        return loader

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", self.lightning_module.trainer.val_dataloaders, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", self.lightning_module.trainer.test_dataloaders, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", self.lightning_module.trainer.predict_dataloaders, args, kwargs)

    def _evaluation_step(self, name: str, loaders: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the step, without a trace if this rank has no batch left and only computes along with the others."""
        step, trainer = getattr(super(), name), self.lightning_module.trainer
        numbers = [value for value in (*args, *kwargs.values())[1:] if isinstance(value, int)]  # as the step takes them
        batch_idx, dataloader_idx = [*numbers, 0, 0][:2]
        is_own = not numbers or _is_own(loaders, batch_idx, dataloader_idx)
        with ExitStack() as stack:
            self._draw_noise(stack, name, batch_idx, dataloader_idx)
            if is_own:
                return step(*args, **kwargs)
            stack.enter_context(without_trace(self.lightning_module, trainer._results))
            step(*args, **kwargs)
        return None

    def begin_evaluation_batch(self, batch_idx: int, dataloader_idx: int) -> None:
        """Skip the hooks of a batch with which this rank only computes along. The first callback calls this."""
        trainer = self.lightning_module.trainer
        loaders = getattr(trainer, f"{trainer.state.stage.dataloader_prefix}_dataloaders")
        self.is_computing_along = not _is_own(loaders, batch_idx, dataloader_idx)
        if self.is_computing_along:
            self._skipped_hooks = ExitStack()
            callbacks = [item for item in trainer.callbacks if not type(item).__module__.startswith(OWN_PACKAGES)]
            for owner, hook in product([self.lightning_module, *callbacks], BATCH_HOOKS):
                self._skipped_hooks.enter_context(patch.object(owner, hook, None))  # Lightning does not call it then

    def end_computing_along(self) -> None:
        """Let Lightning call all hooks again, before anything is saved."""
        self.is_computing_along = False
        self._skipped_hooks.close()

    def _print_once(self, note: str, trainer: Any) -> None:
        if note and note not in self._printed_notes and trainer.is_global_zero:
            self._printed_notes += (note,)
            print(note, flush=True)

    def _check_test_loaders(self, trainer: Any) -> None:
        """Reject loaders of the test before training, if they can be made by then; leave no trace of making them."""
        self._has_checked_test_loaders, effects = True, AttributeEffects(trainer, max_entries=MAX_ENTRIES)
        effects.choose()
        effects.capture()
        try:
            created = trainer.datamodule.test_dataloader()
            loaders = (created if isinstance(created, CombinedLoader) else CombinedLoader(created)).flattened
        except ConfigError:
            raise
        except Exception:  # the researcher's setup("test") may have to come first
            return
        finally:
            effects.restore(effects.changed())
        for loader in loaders:
            shard_dataloader(loader, RunningStage.TESTING, stream_splits=self.stream_splits, **data_rank_and_size(self))


def _is_own(loaders: Any, batch_idx: int, dataloader_idx: int) -> bool:
    loader = tree_leaves(loaders)[dataloader_idx]
    return not isinstance(loader, EvenBatches) or loader.is_own(batch_idx)


def shard_dataloader(
    loader: Any,
    stage: RunningStage,
    *,
    rank: int,
    num_ranks: int,
    is_single_process: bool = False,
    stream_splits: str | None = None,
) -> tuple[Any, str]:
    """Return a loader with this rank's samples, and a note to print ("" for none).

    Args:
        stream_splits: who splits a home-made stream.
        is_single_process: whether this is the only process: then a stream of an evaluation stays as it is.

    Raises:
        ConfigError: the loader cannot be shared out.
    """
    is_training, split = stage == RunningStage.TRAINING, stage.dataloader_prefix or "train"
    if order_of(loader) is not None:
        return loader, ""
    if is_single_process and not is_training and not is_map_style(loader):
        return loader, ""
    place = {"rank": rank, "num_ranks": num_ranks, "seed": run_seed()}
    if is_map_style(loader):
        return share_loader(_as_plain_loader(loader), stage, **place)
    if not hasattr(loader, "__iter__") or hasattr(loader, "__next__"):
        rule = "A loader must be iterable, once for each epoch"
        raise loader_error(split, loader, rule=rule, fix="a torch.utils.data.DataLoader")
    stream = StreamLoader(loader, **place, split=split, splits=stream_splits)
    return stream, stream.note


def may_be_uneven(loader: Any) -> bool:
    """Return whether ranks may have different numbers of batches."""
    if isinstance(loader, StreamLoader):
        return True
    order = order_of(loader)
    return order is not None and not order.is_even


def _as_plain_loader(loader: Any) -> DataLoader:
    """Return a StatefulDataLoader of a map-style dataset as a DataLoader: its place follows from the order."""
    if type(loader).__iter__ is DataLoader.__iter__:
        return loader
    other = object.__new__(DataLoader)
    vars(other).update(vars(loader))
    return other
