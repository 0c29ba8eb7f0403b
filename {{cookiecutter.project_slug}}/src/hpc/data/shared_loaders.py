"""A researcher's own loaders, shared out among ranks: each rank gets different samples, and no sample comes twice.

The batches of a plain DataLoader over a map-style dataset are replaced; dataset, collate function and workers stay. A
loader that cannot be shared out is rejected: if all ranks trained on the same samples, it would look like a faster run.
"""

import os
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from hpc.config.errors import ConfigError
from hpc.data import noted_batches, replay
from hpc.data.sampler import EvalBatchSampler, GlobalOrderSampler, RankBatchSampler, batch_ranges

USE_ONE_DEVICE = "one device: trainer=gpu or trainer=cpu"
USE_PLAIN_LOADER = "a DataLoader with batch_size=... over a dataset with __len__ and __getitem__"


def data_rank_and_size(strategy: Any) -> dict[str, int]:
    """Return this process's rank among those that get different samples. Ranks of a tensor-parallel group share one."""
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None)
    return {"rank": kwargs["rank"], "num_ranks": kwargs["num_replicas"]} if kwargs else {"rank": 0, "num_ranks": 1}


class ShardsDataLoaders:
    """A mixin for strategies that shares out the loaders that Lightning passes to them."""

    lightning_module: Any
    evaluation: Sequence[list[Any]] = ()  # saved generators of each validation loader that is still to be created
    _printed_notes: tuple[str, ...] = ()

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        is_single_process, stage = trainer.world_size == 1, trainer.state.stage
        loader, note = shard_dataloader(
            dataloader, stage, is_single_process=is_single_process, **data_rank_and_size(self)
        )
        if stage == RunningStage.TRAINING and not is_single_process:
            self._check_evaluation_loaders(trainer)
        self._print_once(note, trainer)
        is_validating = stage in (RunningStage.SANITY_CHECKING, RunningStage.VALIDATING)
        has_own_generator = isinstance(getattr(loader, "sampler", None), EvalBatchSampler)
        if is_validating and not has_own_generator and noted_batches.make_workers_short_lived(loader):
            self._print_once(f"val: {noted_batches.NOT_PERSISTENT}", trainer)
        if is_validating and self.evaluation:
            replay.restore_evaluation(trainer, loader, saved=self.evaluation[0])
            self.evaluation = self.evaluation[1:]
        return loader

    def _print_once(self, note: str, trainer: Any) -> None:
        if note and note not in self._printed_notes and trainer.is_global_zero:
            self._printed_notes += (note,)
            print(note, flush=True)

    def _check_evaluation_loaders(self, trainer: Any) -> None:
        """Reject loaders of validation and test before training, if they can be created by then."""
        limits = {"val": trainer.limit_val_batches, "test": trainer.limit_test_batches}
        for split in (split for split, limit in limits.items() if limit and trainer.datamodule is not None):
            try:
                created = getattr(trainer.datamodule, f"{split}_dataloader")()
                loaders = (created if isinstance(created, CombinedLoader) else CombinedLoader(created)).flattened
            except ConfigError:
                raise
            except Exception:  # the researcher's setup("test") may have to come first
                continue
            stage, place = (
                RunningStage.TESTING if split == "test" else RunningStage.VALIDATING,
                data_rank_and_size(self),
            )
            for loader in loaders:
                shard_dataloader(loader, stage, rank=place["rank"], num_ranks=place["num_ranks"])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, but without truncating the mean of integers, such as counts of samples."""
        if reduce_op in ("mean", "avg") and isinstance(tensor, Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)  # type: ignore[misc]


def shard_dataloader(
    loader: Any, stage: RunningStage, *, rank: int, num_ranks: int, is_single_process: bool = False
) -> tuple[object, str]:
    """Return a loader with this rank's samples, and a note to print ("" for none).

    Args:
        is_single_process: whether this is the only process: then the researcher's loader stays as it is.

    Raises:
        ConfigError: the loader cannot be shared out, or a run could not be resumed with it.
    """
    is_training, split = stage == RunningStage.TRAINING, stage.dataloader_prefix or "train"
    if isinstance(getattr(loader, "sampler", None), GlobalOrderSampler | EvalBatchSampler):
        return loader, ""
    if is_training:
        _reject_unresumable(loader)
    if is_single_process:
        return loader, ""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        rule = f"Each of the {num_ranks} ranks must get different samples; this loader gives all of them the same"
        raise _loader_error(split, loader, rule=rule, fix=f"{USE_PLAIN_LOADER}, or {USE_ONE_DEVICE}")
    sampler = _distributed_sampler(loader)
    if sampler and _stays_as_it_is(split, loader, sampler=sampler, is_training=is_training, ranks=(rank, num_ranks)):
        return loader, ""
    order, batches = _find_samplers(split, loader, sampler=sampler, num_ranks=num_ranks)
    num_samples, batch_size = len(order), batches.batch_size
    if batches.drop_last:  # an evaluation leaves out as many samples as in one process
        num_samples -= num_samples % (batch_size * num_ranks if is_training else batch_size)
    if num_samples < num_ranks:
        rule = f"Each of the {num_ranks} ranks must get a batch; there are only {len(order)} samples"
        raise _loader_error(split, loader, rule=rule, fix=f"more samples, a smaller batch, or {USE_ONE_DEVICE}")
    parts = batch_ranges(num_samples, batch_size, rank=rank, num_ranks=num_ranks)
    note = f"{split}: {num_samples} samples are shared out among {num_ranks} ranks, {batch_size} in a batch of each"
    shared: Any = RankBatchSampler(order, parts, seed=_run_seed())
    # As Lightning did with the loader of a prediction, whose samples it records.
    shared = _IndexBatchSamplerWrapper(shared) if stage == RunningStage.PREDICTING else shared
    return _with_batches(loader, shared), note


def reject_differing_orders(loaders: Any, group: Any) -> None:
    """Compare the order that each loader has drawn. All ranks must call this after its first batch.

    Args:
        group: of all ranks, on the host; None: there is one rank.

    Raises:
        ConfigError: on all ranks, if they took their parts of different orders: some samples would be repeated.
    """
    batch_samplers = [getattr(loader, "batch_sampler", None) for loader in tree_leaves(loaders)] if group else []
    for batches in batch_samplers:
        shared = batches.batches if isinstance(batches, noted_batches.RecordingBatchSampler) else _unwrap(batches)
        if not isinstance(shared, RankBatchSampler) or shared.is_compared or shared.checksum is None:
            continue
        shared.is_compared = True
        max_and_minus_min = torch.tensor([shared.checksum, -shared.checksum])
        dist.all_reduce(max_and_minus_min, dist.ReduceOp.MAX, group=group)
        if max_and_minus_min.sum():
            name = type(shared.sampler).__name__
            rule = f"{name} must give all ranks the same order of samples, of which each gets its part; "
            rule += "it gives them different orders"
            fix = f"shuffle=True in place of it, or in {name} a fixed seed and nothing else that differs between ranks"
            raise ConfigError("data", name, rule, fix)


def _reject_unresumable(loader: Any) -> None:
    """Raise `ConfigError` for a training loader in which a resumed run cannot find its place."""
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    has_state = hasattr(loader, "state_dict")
    if is_stream or has_state or not hasattr(loader, "__len__"):
        kind = "a stream" if is_stream else "a loader with a state_dict()" if has_state else "this loader"
        rule = f"A resumed run must continue at the same sample; with {kind} it would start again from the first one"
        raise _loader_error("train", loader, rule=rule, fix=USE_PLAIN_LOADER)
    if sized_len(loader) == 0:
        rule = "The loader must have at least one batch to train on"
        raise _loader_error("train", loader, rule=rule, fix="more samples, or drop_last=False")


def _distributed_sampler(loader: DataLoader) -> Any:
    """Return the sampler of a loader that knows which rank it serves; None if there is none."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.sampler, loader.batch_sampler, inner):
        if hasattr(sampler, "rank") and hasattr(sampler, "num_replicas"):
            return sampler
    return None


def _stays_as_it_is(split: str, loader: DataLoader, *, sampler: Any, is_training: bool, ranks: tuple[int, int]) -> bool:
    """Return whether a loader with a distributed sampler can stay as it is.

    Otherwise, it is one of an evaluation whose DistributedSampler repeats samples, and can be shared out.

    Args:
        ranks: this rank, and their number.

    Raises:
        ConfigError: the sampler is for another rank, or repeats or omits samples of an evaluation in its own way.
    """
    rank, num_ranks = ranks
    name = type(sampler).__name__
    if (sampler.rank, sampler.num_replicas) != (rank, num_ranks):
        rule = f"The sampler must be for rank {rank} of {num_ranks} that get different samples; "
        rule += f"{name} is for rank {sampler.rank} of {sampler.num_replicas}"
        fix = "the same loader without it: it is shared out, or its arguments from trainer.distributed_sampler_kwargs"
        raise _loader_error(split, loader, rule=rule, fix=fix)
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    if is_training or sampler.num_replicas * len(sampler) == num_samples:
        return True
    if type(sampler) is not DistributedSampler:
        rule = f"Evaluation must count each of the {num_samples} samples once; "
        rule += f"{name} gives {sampler.num_replicas} * {len(sampler)}"
        raise _loader_error(split, loader, rule=rule, fix="the same loader without a sampler: it is shared out exactly")
    return False


def _find_samplers(split: str, loader: DataLoader, *, sampler: Any, num_ranks: int) -> tuple[Any, BatchSampler]:
    """Return the sampler that orders a loader's samples alike on all ranks, and its batch sampler.

    Raises:
        ConfigError: the loader was given batches, and neither their order nor their size is known.
    """
    batches: Any = _unwrap(loader.batch_sampler)
    if type(batches) is not BatchSampler or not hasattr(batches.sampler, "__len__"):
        rule = f"Each of the {num_ranks} ranks must get different samples, and this sampler cannot be shared out"
        fix = f"a DistributedSampler (with `rank` and `num_replicas`), or {USE_PLAIN_LOADER}"
        raise _loader_error(split, loader, rule=rule, fix=fix)
    order: Any = SequentialSampler(loader.dataset) if sampler else batches.sampler  # type: ignore[arg-type]
    return order, batches


def _unwrap(batches: Any) -> Any:
    """Return the batch sampler that Lightning has wrapped to record the samples of a prediction."""
    return batches._batch_sampler if isinstance(batches, _IndexBatchSamplerWrapper) else batches


def _with_batches(loader: DataLoader, batches: Any) -> DataLoader:
    """Return a copy of a loader with other batches.

    It is not constructed again, as the arguments of a subclass are unknown; DataLoader forbids setting the attributes.
    """
    other = copy(loader)
    other.__dict__ |= {"sampler": batches, "batch_sampler": batches}
    return other


def _loader_error(split: str, loader: object, *, rule: str, fix: str) -> ConfigError:
    dataset = getattr(loader, "dataset", None)
    over = f" over {type(dataset).__name__}" if dataset is not None else ""
    return ConfigError("data", f"{type(loader).__name__}{over} ({split})", rule, fix)


def _run_seed() -> int:
    """Return the run's seed, which `lightning.seed_everything` has written into the environment."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))
