"""Loaders that a researcher brings, shared out among ranks: each rank gets samples of its own, and none comes twice.

Of a plain DataLoader over a map-style dataset the batches are replaced; dataset, collate function and workers stay.
What cannot be shared out is rejected: ranks that all trained on the same samples would look like a faster run.
"""

import os
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from hpc.config.errors import ConfigError
from hpc.data import noted_batches, replay
from hpc.data.sampler import EvalBatchSampler, GlobalBatchSampler, SharedBatches, batch_ranges

USE_ONE_DEVICE = "one device: trainer=gpu or trainer=cpu"
USE_PLAIN_LOADER = "a DataLoader with batch_size=... over a dataset with __len__ and __getitem__"


def data_rank(strategy: Any) -> dict[str, int]:
    """This process among those that get different samples. Ranks of one tensor-parallel group share theirs."""
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None)
    return {"rank": kwargs["rank"], "num_ranks": kwargs["num_replicas"]} if kwargs else {"rank": 0, "num_ranks": 1}


class SharesLoaders:
    """For a strategy: shares out the loaders that Lightning hands to it."""

    lightning_module: Any
    evaluation: Sequence[list[Any]] = ()  # what loaders of a validation go on with, till they are made
    _said: tuple[str, ...] = ()

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        alone, stage = trainer.world_size == 1, trainer.state.stage
        loader, said = share_loader(dataloader, stage, alone=alone, **data_rank(self))
        if stage == RunningStage.TRAINING and not alone:
            self._look_ahead(trainer)
        self._say(said, trainer)
        is_validated = stage in (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING)
        is_ours = isinstance(getattr(loader, "sampler", None), EvalBatchSampler)  # draws from a generator of its own
        if is_validated and not is_ours and noted_batches.make_workers_short_lived(loader):
            self._say(f"val: {noted_batches.NOT_PERSISTENT}", trainer)
        if is_validated and self.evaluation:
            replay.restore_evaluation(trainer, loader, saved=self.evaluation[0])
            self.evaluation = self.evaluation[1:]
        return loader

    def _say(self, said: str, trainer: Any) -> None:
        if said and said not in self._said and trainer.is_global_zero:
            self._said += (said,)
            print(said, flush=True)

    def _look_ahead(self, trainer: Any) -> None:
        """What cannot be evaluated is told before training, as far as its loaders can be made by then."""
        limits = {"val": trainer.limit_val_batches, "test": trainer.limit_test_batches}
        for split in (split for split, limit in limits.items() if limit and trainer.datamodule is not None):
            try:
                made = getattr(trainer.datamodule, f"{split}_dataloader")()
                loaders = (made if isinstance(made, CombinedLoader) else CombinedLoader(made)).flattened
            except ConfigError:
                raise
            except Exception:  # the researcher's setup("test") comes first
                continue
            stage, place = (RunningStage.TESTING if split == "test" else RunningStage.VALIDATING), data_rank(self)
            for loader in loaders:
                share_loader(loader, stage, rank=place["rank"], num_ranks=place["num_ranks"])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning does it, which counts samples in whole numbers, and would cut their mean over ranks to one."""
        if reduce_op in ("mean", "avg") and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]


def share_loader(
    loader: Any, stage: RunningStage, *, rank: int, num_ranks: int, alone: bool = False
) -> tuple[object, str]:
    """Return the loader with this rank's samples, and what to tell of it.

    Args:
        alone: there is one process: what the researcher brings stays as it is.

    Raises:
        ConfigError: it cannot be shared out, or a run could not go on with it.
    """
    training, split = stage == RunningStage.TRAINING, stage.dataloader_prefix or "train"
    if isinstance(getattr(loader, "sampler", None), GlobalBatchSampler | EvalBatchSampler):
        return loader, ""
    if training:
        _reject_without_place(loader)
    if alone:
        return loader, ""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        rule = f"each of the {num_ranks} ranks must get samples of its own; this loader gives all of them the same"
        raise _rejected(split, loader, rule, f"{USE_PLAIN_LOADER}, or {USE_ONE_DEVICE}")
    if own := _place_aware(loader):
        _reject_other_place(split, loader, own, rank, num_ranks)
        if training or own.num_replicas * len(own) == len(loader.dataset):  # type: ignore[arg-type]
            return loader, ""
        if type(own) is not DistributedSampler:
            rule = f"evaluation must count each of the {len(loader.dataset)} samples once; "  # type: ignore[arg-type]
            rule += f"{type(own).__name__} gives {own.num_replicas} * {len(own)}"
            raise _rejected(split, loader, rule, "the same loader without a sampler: it is shared out exactly")
    batches: Any = loader.batch_sampler  # a loader that was given one knows neither its order nor how large batches are
    if type(batches) is not BatchSampler or not hasattr(batches.sampler, "__len__"):
        rule = f"each of the {num_ranks} ranks must get samples of its own; how to share out this sampler is not known"
        raise _rejected(
            split, loader, rule, f"a DistributedSampler (with `rank` and `num_replicas`), or {USE_PLAIN_LOADER}"
        )
    order: Any = SequentialSampler(loader.dataset) if own else batches.sampler  # type: ignore[arg-type]
    num_samples, batch_size = len(order), batches.batch_size
    if batches.drop_last:  # of an evaluation as many as one process would leave out
        num_samples -= num_samples % (batch_size * num_ranks if training else batch_size)
    if num_samples < num_ranks:
        rule = f"each of the {num_ranks} ranks must get a batch; there are {len(order)} samples"
        raise _rejected(split, loader, rule, f"more samples, a smaller batch, or {USE_ONE_DEVICE}")
    parts = batch_ranges(num_samples, batch_size, rank=rank, num_ranks=num_ranks)
    said = f"{split}: {num_samples} samples are shared out among {num_ranks} ranks, {batch_size} in a batch of each"
    return _with_batches(loader, SharedBatches(order, parts, seed=_seed())), said


def reject_differing_orders(loaders: Any, group: Any) -> None:
    """Compare the order that each loader has drawn. To be called on all ranks, after its first batch.

    Args:
        group: of all ranks, on the host; None: there is one rank.

    Raises:
        ConfigError: on all ranks, where each took its part of another order: some samples would be repeated.
    """
    given = [getattr(loader, "batch_sampler", None) for loader in tree_leaves(loaders)] if group else []
    shared = [batches.batches if isinstance(batches, noted_batches.NotedBatches) else batches for batches in given]
    for batches in (batches for batches in shared if isinstance(batches, SharedBatches) and not batches.is_compared):
        if batches.checksum is None:
            continue
        batches.is_compared = True
        both = torch.tensor([batches.checksum, -batches.checksum])
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        if both.sum():
            name = type(batches.sampler).__name__
            rule = f"{name} must give all ranks the same order of samples, of which each gets its part; "
            rule += "it gives each rank another one"
            fix = f"shuffle=True in place of it, or in {name} a fixed seed, and what else it goes by alike on all ranks"
            raise ConfigError("data", name, rule, fix)


def _reject_without_place(loader: Any) -> None:
    """A run that goes on must find its place in the data again."""
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    if is_stream or hasattr(loader, "state_dict") or not hasattr(loader, "__len__"):
        what = "a stream" if is_stream else "a loader with a state_dict()" if hasattr(loader, "state_dict") else "this"
        rule = f"an interrupted run must go on at the same sample; with {what} it would begin at the first one again"
        raise _rejected("train", loader, rule, USE_PLAIN_LOADER)
    if sized_len(loader) == 0:
        raise _rejected("train", loader, "it must have a batch to train on", "more samples, or drop_last=False")


def _place_aware(loader: DataLoader) -> Any:
    """The sampler of a loader that says which rank it serves; None: there is none."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.sampler, loader.batch_sampler, inner):
        if hasattr(sampler, "rank") and hasattr(sampler, "num_replicas"):
            return sampler
    return None


def _reject_other_place(split: str, loader: DataLoader, own: Any, rank: int, num_ranks: int) -> None:
    if (own.rank, own.num_replicas) != (rank, num_ranks):
        rule = f"the sampler here must be for rank {rank} of {num_ranks} that get different samples; "
        rule += f"{type(own).__name__} is for rank {own.rank} of {own.num_replicas}"
        fix = "the same loader without it: it is shared out, or its arguments from trainer.distributed_sampler_kwargs"
        raise _rejected(split, loader, rule, fix)


def _with_batches(loader: DataLoader, batches: SharedBatches) -> DataLoader:
    """A copy of a loader with other batches.

    Its class need not be made anew, whose arguments are not known; a DataLoader lets nobody set these two.
    """
    other = copy(loader)
    other.__dict__ |= {"sampler": batches, "batch_sampler": batches}
    return other


def _rejected(split: str, loader: object, rule: str, fix: str) -> ConfigError:
    dataset = getattr(loader, "dataset", None)
    of = f" over {type(dataset).__name__}" if dataset is not None else ""
    return ConfigError("data", f"{type(loader).__name__}{of} ({split})", rule, fix)


def _seed() -> int:
    """The run's, as `lightning.seed_everything` has left it."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
