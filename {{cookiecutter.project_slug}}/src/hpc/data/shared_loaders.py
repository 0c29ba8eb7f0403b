"""A researcher's own loaders, shared out among ranks: each rank gets different samples, and no sample comes twice.

The order of a loader over a map-style dataset is cut into parts (`map_loaders`); a stream is shared out sample by
sample (`stream_loader`). Whatever changes is printed once.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hpc.config.errors import ConfigError
from hpc.data import noted_batches, replay
from hpc.data.even_batches import EvenBatches, suppressed
from hpc.data.loader_making import MakingEffects
from hpc.data.map_loaders import loader_error, share_loader, unwrap
from hpc.data.rank_samplers import RankSampler
from hpc.data.rank_steps import RankSteps, data_rank_and_size, run_seed
from hpc.data.sampler import EvalBatchSampler, GlobalOrderSampler
from hpc.data.stream_loader import StreamLoader

# Loaders that take batches of indices from their samplers.
_ITERATIONS = (DataLoader.__iter__, StatefulDataLoader.__iter__)


class ShardsDataLoaders(RankSteps):
    """A mixin for strategies that shares out the loaders that Lightning passes to them."""

    lightning_module: Any
    evaluation: Sequence[list[Any]] = ()  # saved generators of each validation loader that is still to be created
    _printed_notes: tuple[str, ...] = ()
    _has_checked_test_loaders = False
    _host_group: Any = None  # of all ranks; made when it is needed first

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        is_single_process, stage = trainer.world_size == 1, trainer.state.stage
        loader, note = shard_dataloader(
            dataloader, stage, is_single_process=is_single_process, **data_rank_and_size(self)
        )
        is_validating = stage in (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING)
        has_own_generator = isinstance(getattr(loader, "sampler", None), EvalBatchSampler)
        if is_validating and not has_own_generator and noted_batches.make_workers_short_lived(loader):
            self._print_once(f"val: {noted_batches.NOT_PERSISTENT}", trainer)
        if not is_single_process:
            self._host_group = self._host_group or dist.new_group(backend="gloo")
            if _extremes(int(may_be_uneven(loader)), self._host_group)[1]:  # on any rank, as their datasets may differ
                loader = EvenBatches(loader, group=self._host_group, repeats_last=stage != RunningStage.TRAINING)
        data = getattr(trainer, "datamodule", None)
        has_test = data is not None and trainer.limit_test_batches and not self._has_checked_test_loaders
        if stage == RunningStage.TRAINING and not is_single_process and has_test:
            self._check_test_loaders(trainer)
        self._print_once(note, trainer)
        if is_validating and self.evaluation:
            replay.restore_evaluation(trainer, loader, saved=self.evaluation[0])
            self.evaluation = self.evaluation[1:]
        return loader

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation_step", self.lightning_module.trainer.val_dataloaders, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test_step", self.lightning_module.trainer.test_dataloaders, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("predict_step", self.lightning_module.trainer.predict_dataloaders, args, kwargs)

    def _evaluation_step(self, name: str, loaders: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the step, suppressed if this rank has no batch left and only computes with the others."""
        step = getattr(super(), name)
        numbers = [value for value in (*args, *kwargs.values())[1:] if isinstance(value, int)]  # as the step takes them
        batch_idx, dataloader_idx = [*numbers, 0, 0][:2]
        loader = tree_leaves(loaders)[dataloader_idx] if numbers else None
        num_own = loader.num_own if isinstance(loader, EvenBatches) else None
        with ExitStack() as stack:
            self._draw_noise(stack, name, batch_idx, dataloader_idx)
            if num_own is None or batch_idx < num_own:
                return step(*args, **kwargs)
            stack.enter_context(suppressed(self.lightning_module, has_logged=num_own > 0))
            step(*args, **kwargs)
        return None

    def _print_once(self, note: str, trainer: Any) -> None:
        if note and note not in self._printed_notes and trainer.is_global_zero:
            self._printed_notes += (note,)
            print(note, flush=True)

    def _check_test_loaders(self, trainer: Any) -> None:
        """Reject loaders of the test before training, if they can be made by then; leave no trace of making them."""
        self._has_checked_test_loaders, effects = True, MakingEffects(trainer)
        effects.begin_epoch()
        effects.restore_and_capture()
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
            shard_dataloader(loader, RunningStage.TESTING, **data_rank_and_size(self))


def shard_dataloader(
    loader: Any, stage: RunningStage, *, rank: int, num_ranks: int, is_single_process: bool = False
) -> tuple[Any, str]:
    """Return a loader with this rank's samples, and a note to print ("" for none).

    Args:
        is_single_process: whether this is the only process: then a loader of an evaluation stays as it is.

    Raises:
        ConfigError: the loader cannot be shared out.
    """
    is_training, split = stage == RunningStage.TRAINING, stage.dataloader_prefix or "train"
    if isinstance(getattr(loader, "sampler", None), GlobalOrderSampler | EvalBatchSampler | RankSampler):
        return loader, ""
    if is_single_process and not is_training:
        return loader, ""
    place = {"rank": rank, "num_ranks": num_ranks, "seed": run_seed()}
    if is_map_style(loader):
        return share_loader(_as_plain_loader(loader), stage, **place)
    if not hasattr(loader, "__iter__") or hasattr(loader, "__next__"):
        rule = "A loader must be iterable, once for each epoch"
        raise loader_error(split, loader, rule=rule, fix="a torch.utils.data.DataLoader")
    stream = StreamLoader(loader, **place, split=split)
    return stream, stream.note


def is_map_style(loader: Any) -> bool:
    """Return whether a loader fetches its samples by index."""
    is_own_kind = isinstance(loader, DataLoader) and type(loader).__iter__ in _ITERATIONS
    return is_own_kind and not isinstance(loader.dataset, IterableDataset)


def may_be_uneven(loader: Any) -> bool:
    """Return whether ranks may have different numbers of batches."""
    if isinstance(loader, StreamLoader):
        return True
    batches = unwrap(getattr(loader, "batch_sampler", None) or getattr(loader, "sampler", None))
    return isinstance(batches, RankSampler) and not batches.is_even


def reject_differing_orders(loaders: Any, group: Any, *, split: str) -> None:
    """Compare each loader's length, and the order that it has drawn. All ranks must call this after its first batch.

    Args:
        group: of all ranks, on the host; None: there is one rank.

    Raises:
        ConfigError: on all ranks, if they have different numbers of batches, or took their parts of different orders:
            some samples would be repeated.
    """
    for loader in tree_leaves(loaders) if group else []:
        if is_map_style(loader):
            _reject_differing_lengths(loader, group, split=split)
        shared = noted_batches.recorded_sampler(loader)
        if not isinstance(shared, RankSampler) or shared.is_compared or shared.checksum is None:
            continue
        shared.is_compared = True
        least, most = _extremes(shared.checksum, group)
        if least < most:
            name = type(shared.sampler).__name__
            rule = f"{name} must give all ranks the same order of samples, of which each gets its part; "
            rule += "it gives them different orders"
            fix = f"the same dataset on all ranks, and shuffle=True in place of {name}, or in {name} a fixed seed and "
            fix += "nothing else that differs between ranks"
            raise ConfigError("data", name, rule, fix)


def _reject_differing_lengths(loader: DataLoader, group: Any, *, split: str) -> None:
    length = sized_len(loader)  # None: the sampler does not say
    least, most = _extremes(-1 if length is None else length, group)
    if least < most:
        fewest = "an unknown number" if least == -1 else least
        rule = "The loader must have equally many batches on all ranks, which would wait for each other; it has "
        fix = "a loader of the whole dataset, without a sampler, on each rank: it is shared out"
        raise loader_error(split, loader, rule=f"{rule}{fewest} on one and {most} on another", fix=fix)


def _extremes(number: int, group: Any) -> tuple[int, int]:
    """Return the smallest and the largest number of all ranks."""
    max_and_minus_min = torch.tensor([number, -number])
    dist.all_reduce(max_and_minus_min, dist.ReduceOp.MAX, group=group)
    return -int(max_and_minus_min[1]), int(max_and_minus_min[0])


def _as_plain_loader(loader: Any) -> DataLoader:
    """Return a StatefulDataLoader of a map-style dataset as a DataLoader: its place follows from the order."""
    if type(loader).__iter__ is DataLoader.__iter__:
        return loader
    other = object.__new__(DataLoader)
    vars(other).update(vars(loader))
    return other
