"""A rank's loader without the batches that an interrupted prediction has written already."""

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Sampler

from hpc.config.errors import ConfigError
from hpc.data.even_batches import EvenBatches
from hpc.data.sample_order import ARRAYS, EpochIndex, SampleOrder, index_sampler
from hpc.data.stream_loader import is_map_style

ORDER_FIX = "shuffle=False in predict_dataloader and the batch size as it was, or a new run_dir="


class RestOfBatches(Sampler[Any]):
    """A loader, or its sampler of batches, without its first ones. Those of a sampler are drawn and never fetched.

    Args:
        done: the indices of their samples when they were written; None: unknown, as of a stream.
        stop: number of all batches; None: as many as there are.
        report_progress: called for each batch that is passed over.
    """

    def __init__(
        self, batches: Any, done: Sequence[list[int] | None], *, stop: int | None, report_progress: Callable[[], None]
    ) -> None:
        self.batches, self.done, self.stop, self.report_progress = batches, done, stop, report_progress

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # missing in a copy that is being made
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        num = len(self.batches) if self.stop is None else min(self.stop, len(self.batches))
        return max(0, num - len(self.done))

    def __iter__(self) -> Iterator[Any]:
        for number, batch in zip(count() if self.stop is None else range(self.stop), self.batches, strict=False):
            if number >= len(self.done):
                yield batch
                continue
            if (before := self.done[number]) is not None and _indices(batch) not in (None, before):
                rule = f"A prediction must go on in the order in which it began; batch {number} has other samples now"
                raise ConfigError("data", None, rule, ORDER_FIX, only_this_rank=True)
            self.report_progress()


def leave_out_first(
    loader: Any, done: Sequence[list[int] | None], *, limit: int | float, report_progress: Callable[[], None]
) -> Any:
    """Return a loader, which is not iterated yet, without its first batches.

    Args:
        done: their samples' indices; see `RestOfBatches`.
        limit: of all batches, as `trainer.limit_predict_batches` says it: a number, or a fraction.
    """
    stop = limit if isinstance(limit, int) else None if limit == 1.0 else int(len(loader) * limit)
    if isinstance(loader, EvenBatches):
        limit = 1.0 if stop is None else stop
        loader.loader = leave_out_first(loader.loader, done, limit=limit, report_progress=report_progress)
        return loader
    if not is_map_style(loader):
        return RestOfBatches(loader, done, stop=stop, report_progress=report_progress)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # DataLoader does not allow this attribute to be set.
    vars(loader)[name] = RestOfBatches(index_sampler(loader), done, stop=stop, report_progress=report_progress)
    return loader


def sample_indices(loader: Any, number: int) -> list[int] | None:
    """Return the indices of a batch's samples in the dataset; None if the loader does not tell.

    Args:
        number: of the batch, also of those that were left out.
    """
    sampler = index_sampler(loader)
    batches = sampler.batches if isinstance(sampler, RestOfBatches) else sampler
    if isinstance(batches, SampleOrder) and batches.gives == ARRAYS:
        return list(batches.parts[number])  # type: ignore[index]  # in the order of the dataset
    seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)  # Lightning's wrapper has it
    return _indices(seen[number]) if seen else None


def is_repeated(loader: Any, batch_idx: int) -> bool:
    """Return whether another rank has the same batch, and this one computes it only to keep in step."""
    return isinstance(loader, EvenBatches) and not loader.is_own(batch_idx)


def _indices(batch: Any) -> list[int] | None:
    """Return the sample indices in what a sampler gives: one, several, or an array; None for anything else."""
    batch = batch.index if isinstance(batch, EpochIndex) else batch
    if isinstance(batch, np.ndarray | Tensor):
        batch = batch.tolist()
    try:
        return [operator.index(number) for number in (batch if isinstance(batch, list | tuple | range) else [batch])]
    except TypeError:
        return None
