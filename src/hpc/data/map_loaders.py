"""Loaders of map-style datasets, shared out among ranks: dataset, collate function and workers of a loader stay.

The order of its samples and their random numbers become a function of (seed, epoch), in every layout.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hpc.config.errors import ConfigError
from hpc.data.batch_parts import TrainingRanges, batch_ranges
from hpc.data.sample_order import BATCHES, INDICES, SampleOrder, unwrap
from hpc.data.sample_randomness import seed_samples
from hpc.privates.lightning import IndexBatchSamplerWrapper
from hpc.state.randomness import epoch_key

USE_ONE_DEVICE = "one device: trainer=gpu or trainer=cpu"


def share_loader(
    loader: DataLoader, stage: RunningStage, *, rank: int, num_ranks: int, seed: int
) -> tuple[DataLoader, str]:
    """Return a loader with this rank's samples, and a note to print ("" for none).

    Raises:
        ConfigError: its sampler is for another rank, or there is no batch for each rank.
    """
    is_training, split = stage == RunningStage.TRAINING, stage.dataloader_prefix or "train"
    batches: Any = unwrap(loader.batch_sampler)
    own_sampler, is_shared = distributed_sampler(loader), True
    if own_sampler and _stays_as_it_is(split, loader, own_sampler, is_training=is_training, ranks=(rank, num_ranks)):
        if not is_training:
            return loader, ""
        seed, rank, num_ranks, is_shared = (
            epoch_key(seed, rank) % (1 << 32),
            0,
            1,
            False,
        )  # its samples are all of this rank
    cut: Any = {"is_training": is_training, "ranks": (rank, num_ranks), "seed": seed, "is_shared": is_shared}
    order = getattr(batches, "sampler", None)
    if own_sampler and is_shared:
        order = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    if type(batches) is BatchSampler and sized_len(order) is not None:
        shared, note = _cut_order(split, batches, order, **cut)
    else:
        shared, note = _take_turns(split, loader.sampler if batches is None else batches, batches is not None, **cut)
    if is_training and sized_len(shared) == 0:
        rule = f"Each of the {num_ranks} ranks must get a batch" if num_ranks > 1 else "A loader must have a batch"
        fix = f"more samples, a smaller batch, or drop_last=False{f', or {USE_ONE_DEVICE}' * (num_ranks > 1)}"
        raise loader_error(split, loader, rule=f"{rule}; the number of samples is {sized_len(loader.dataset)}", fix=fix)
    # As Lightning did with the loader of a prediction, whose samples it records.
    is_recorded = stage == RunningStage.PREDICTING and batches is not None
    other = _with_batches(loader, IndexBatchSamplerWrapper(shared) if is_recorded else shared)  # type: ignore[arg-type]
    seed_samples(other, seed)
    if not is_training and other.persistent_workers:
        # They get a seed once, in the sanity check, which a resumed run has not. No sample depends on it.
        other.generator = torch.Generator().manual_seed(seed)
    return other, note if is_shared else ""


def distributed_sampler(loader: DataLoader) -> Any:
    """Return the sampler of a loader that knows which rank it serves; None if there is none."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    for sampler in (loader.sampler, loader.batch_sampler, inner):
        if not isinstance(sampler, SampleOrder) and hasattr(sampler, "rank") and hasattr(sampler, "num_replicas"):
            return sampler
    return None


def loader_error(split: str, loader: object, *, rule: str, fix: str) -> ConfigError:
    """Return the error of a loader that breaks a rule."""
    dataset = getattr(loader, "dataset", None)
    over = f" over {type(dataset).__name__}" if dataset is not None else ""
    return ConfigError("data", f"{type(loader).__name__}{over} ({split})", rule, fix)


def _cut_order(
    split: str, batches: BatchSampler, order: Any, *, is_training: bool, ranks: tuple[int, int], **how: Any
) -> tuple[SampleOrder, str]:
    """Return the batches of a rank, cut from the order of a sampler, and a note."""
    (rank, num_ranks), num_samples, batch_size = ranks, len(order), batches.batch_size
    if batches.drop_last:  # an evaluation leaves out as many samples as in one process
        num_samples -= num_samples % (batch_size * num_ranks if is_training else batch_size)
    if is_training:
        num_cut = num_samples if num_samples >= num_ranks else 0
        parts: Sequence[range] = TrainingRanges(num_cut, batch_size, rank=rank, num_ranks=num_ranks)
    else:
        ranges = batch_ranges(num_samples, batch_size, rank=rank, num_ranks=num_ranks)
        parts = [part for part in ranges if part]
    rest = num_samples % (batch_size * num_ranks)
    last_size = rest if is_training and rest % num_ranks else None
    shared_out = f"are shared out among {num_ranks} ranks, {batch_size} in a batch of each"
    note = f"{split}: {num_samples} samples {shared_out if num_ranks > 1 else f'in batches of {batch_size}'}"
    if is_training and isinstance(order, RandomSampler):
        note += "; their order follows from seed and epoch"
    sizes: dict[str, Any] = {"is_even": num_samples >= num_ranks, "last_size": last_size, "num_ranks": num_ranks}
    sizes |= {"batch_size": batch_size, "drop_last": batches.drop_last}
    return SampleOrder(order, parts, rank=rank, **sizes, **how), note if is_training or num_ranks > 1 else ""


def _take_turns(
    split: str, items: Any, has_batches: bool, *, is_training: bool, ranks: tuple[int, int], **how: Any
) -> tuple[SampleOrder, str]:
    """Return every `num_ranks`-th batch of a batch sampler, or of a sampler whose samples are batches, and a note."""
    (rank, num_ranks), parts = ranks, None
    if not has_batches:
        num = len(items) // num_ranks * num_ranks if is_training else len(items)
        parts = [range(place, place + 1) for place in range(rank, num, num_ranks)]
    note = _describe_turns(split, items, is_training=is_training, num_ranks=num_ranks)
    how |= {"gives": BATCHES if has_batches else INDICES, "drops_rest": is_training, "is_even": is_training}
    return SampleOrder(items, parts, rank=rank, num_ranks=num_ranks, **how), note


def _describe_turns(split: str, items: Any, *, is_training: bool, num_ranks: int) -> str:
    """Return the note of batches that ranks take in turns."""
    length, name = len(items), type(items).__name__
    if num_ranks == 1:
        return f"{split}: the batches of {name}, whose random numbers follow from seed and epoch" if is_training else ""
    note = f"{split}: {length} batches of {name} are shared out among {num_ranks} ranks in turns"
    if is_training and (rest := length % num_ranks):
        note += f"; the last {rest} of an epoch {'is' if rest == 1 else 'are'} left out, so that all have equally many"
    return note


def _stays_as_it_is(split: str, loader: DataLoader, sampler: Any, *, is_training: bool, ranks: tuple[int, int]) -> bool:
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
        raise loader_error(split, loader, rule=rule, fix=fix)
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    if is_training or sampler.num_replicas * len(sampler) == num_samples:
        return True
    if sampler is loader.batch_sampler:
        with isolate_rng(include_cuda=False):
            num_own = sum(map(len, sampler))
        if num_own == len(range(rank, num_samples, num_ranks)):
            return True
    if type(sampler) is not DistributedSampler:
        rule = f"Evaluation must count each of the {num_samples} samples once; "
        rule += f"{name} gives {sampler.num_replicas} * {len(sampler)}"
        raise loader_error(split, loader, rule=rule, fix="the same loader without a sampler: it is shared out exactly")
    return False


def _with_batches(loader: DataLoader, batches: Any) -> DataLoader:
    """Return a copy of a loader with other batches, or with other samples if it makes no batches.

    It is not constructed again, as the arguments of a subclass are unknown; DataLoader forbids setting the attributes.
    """
    other = copy(loader)
    vars(other)["sampler"] = batches
    if loader.batch_sampler is not None:
        vars(other)["batch_sampler"] = batches
    return other
