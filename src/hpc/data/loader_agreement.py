"""What ranks must have in common at the first batch: the order of their samples and the number of their batches."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from hpc.config.errors import ConfigError
from hpc.data.map_loaders import loader_error
from hpc.data.sample_order import order_of
from hpc.data.stream_loader import StreamLoader, is_map_style, stream_of
from hpc.data.stream_sharing import NOTHING, RANKS


def reject_differing_orders(loaders: Any, group: Any, *, split: str) -> None:
    """Compare each loader's length, and the order that it has drawn, or the first sample of a stream.

    All ranks must call this after its first batch.

    Args:
        group: of all ranks, on the host; None: there is one rank.

    Raises:
        ConfigError: on all ranks, if they have different numbers of batches, or took their parts of different orders:
            some samples would be repeated.
    """
    for loader in tree_leaves(loaders):
        if (stream := stream_of(loader)) is not None:
            stream.reject_unasked()
            _reject_other_split(stream, group)
        if group and is_map_style(loader):
            _reject_differing_lengths(loader, group, split=split)
        shared = order_of(loader)
        if not group or shared is None or not shared.is_shared or shared.is_compared or shared.checksum is None:
            continue
        shared.is_compared = True
        least, most = extremes(shared.checksum, group)
        if least < most:
            name = type(shared.sampler).__name__
            rule = f"{name} must give all ranks the same order of samples, of which each gets its part; "
            rule += "it gives them different orders"
            fix = f"the same dataset on all ranks, and shuffle=True in place of {name}, or in {name} a fixed seed and "
            fix += "nothing else that differs between ranks"
            raise ConfigError("data", name, rule, fix)


def _reject_differing_lengths(loader: DataLoader, group: Any, *, split: str) -> None:
    length = sized_len(loader)  # None: the sampler does not say
    least, most = extremes(-1 if length is None else length, group)
    if least < most:
        fewest = "an unknown number" if least == -1 else least
        rule = "The loader must have equally many batches on all ranks, which would wait for each other; it has "
        fix = "a loader of the whole dataset, without a sampler, on each rank: it is shared out"
        raise loader_error(split, loader, rule=f"{rule}{fewest} on one and {most} on another", fix=fix)


def _reject_other_split(stream: StreamLoader, group: Any) -> None:
    """Compare the first sample that ranks have read of a stream with what `stream_splits` says of it.

    Raises:
        ConfigError: nothing splits it, and yet ranks have read different samples.
    """
    if stream.num_ranks == 1:
        return
    least, most = extremes(stream.first_checksum(), group)
    name = f"{type(stream.dataset).__name__} ({stream.split})"
    if stream.splits == NOTHING and least < most:
        rule = f"must not be {NOTHING}: {name} gives ranks different samples, of which each would leave some out"
        fix = f"data.stream_splits={RANKS} if it splits its samples by the rank, else a seed for its order"
        raise ConfigError("data.stream_splits", None, rule, fix)
    if stream.splits != NOTHING and 0 <= least == most and stream.shared.rank == 0 and not stream.is_warned:
        stream.is_warned = True
        fix = f"data.stream_splits={NOTHING} if each rank reads all of its samples"
        print(f"warning: all ranks got the same first sample of {name}, which is to split them. Try: {fix}", flush=True)


def extremes(number: int | None, group: Any) -> tuple[int, int]:
    """Return the smallest and the largest number of all ranks that have one; -1 if none has."""
    max_and_minus_min = torch.tensor([-1, -(1 << 62)] if number is None else [number, -number])
    dist.all_reduce(max_and_minus_min, dist.ReduceOp.MAX, group=group)
    return -int(max_and_minus_min[1]), int(max_and_minus_min[0])
