"""Loaders of streams: shared out among ranks and workers, resumed at the very sample, of unknown length too.

torchdata's StatefulDataLoader fetches the samples and asks the workers for their state after each batch.
"""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from hpc.config.errors import ConfigError
from hpc.data.sample_randomness import as_it_is
from hpc.data.stream_sharing import NOTHING, RANKS, WORKERS, SharedStream, has_state, prepare_stream
from hpc.run.signals import block_signals_in_worker

NUM_KEPT_STATES = 4  # the batch in use, those that Lightning has fetched ahead, and the one before them
# Arguments of a DataLoader that stay.
KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
KEPT += ("generator", "prefetch_factor")
# Loaders that ask a sampler for indices, or a stream for samples. Another one may do anything with its batches.
ITERATIONS = (DataLoader.__iter__, StatefulDataLoader.__iter__)


class StreamLoader:
    """A rank's part of a loader without indices, which keeps its state after each of the last batches.

    Args:
        loader: a DataLoader of an IterableDataset, or any iterable of batches.
        splits: who splits the stream, as `data.stream_splits` says it.

    Attributes:
        dataset: the researcher's stream.
        splits: who splits it; see stream_sharing.py.
        num_yielded: batches of this pass, those before a resume included.
        is_warned: whether a warning of this stream was printed.
        note: what to print once.
    """

    def __init__(
        self, loader: Any, *, rank: int, num_ranks: int, seed: int, split: str, splits: str | None = None
    ) -> None:
        is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ in ITERATIONS
        self._has_samples = is_plain and isinstance(loader.dataset, IterableDataset)
        self.dataset = loader.dataset if self._has_samples else loader
        self.batch_size = loader.batch_size if self._has_samples else None
        stream, self.splits = prepare_stream(self.dataset, splits=splits, rank=rank, num_ranks=num_ranks, split=split)
        self.shared = SharedStream(stream, rank=rank, num_ranks=num_ranks, splits=self.splits, seed=seed)
        options: dict[str, Any] = {"collate_fn": as_it_is}
        if self._has_samples:
            options = {name: getattr(loader, name) for name in KEPT}
            options["worker_init_fn"] = partial(_init_worker, loader.worker_init_fn)
        # Each pass draws a seed for its workers, and a resumed run makes more passes; here no sample depends on it.
        options["generator"] = options.get("generator") or torch.Generator().manual_seed(seed)
        warnings.filterwarnings("ignore", ".*set_vital")  # torchdata calls what torch has deprecated
        sizes = {"batch_size": self.batch_size, "drop_last": self._has_samples and loader.drop_last}
        self.loader: Any = StatefulDataLoader(self.shared, **sizes, **options)
        self.num_workers, self.layout = self.loader.num_workers, [num_ranks, self.loader.num_workers]
        self.num_ranks, self.split = num_ranks, split
        self._length, self._num_items = sized_len(loader), sized_len(self.dataset)
        self.num_yielded = 0
        self._states: dict[int, Any] = {}
        self._to_load: dict[str, Any] = {}
        self.is_warned = False
        self.note = self._describe(loader)

    @property
    def sampler(self) -> "StreamLoader":
        """Return what Lightning calls `set_epoch` of."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.shared.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches of this rank. Raises `TypeError` if the stream does not determine it."""
        num_parts = max(1, self.num_workers)
        if self._num_items is not None and self.splits == NOTHING:
            first = self.shared.rank * num_parts
            parts = range(first, first + num_parts)
            return sum(
                self._num_batches(len(range(part, self._num_items, self.num_ranks * num_parts))) for part in parts
            )
        is_known = self.num_ranks == 1 or (self.splits == RANKS and num_parts == 1)
        if self._length is None or not (is_known or self.split == "train"):  # a guess would leave out samples
            raise TypeError("the length of this stream is unknown")
        return self._length if self.splits == RANKS else -(-self._length // self.num_ranks)

    def _num_batches(self, num_items: int) -> int:
        if self.batch_size is None:
            return num_items
        return num_items // self.batch_size if self.loader.drop_last else -(-num_items // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        place, self._to_load = self._to_load, {}
        if place and place["epoch"] == self.shared.epoch:
            self.loader.load_state_dict(place["state"])
        num = place["batches"] if place and place["epoch"] == self.shared.epoch else 0
        batches = iter(self.loader)
        self.num_yielded, self._states = num, {num: self.loader.state_dict()}
        for batch in batches:
            self.num_yielded += 1
            self._states[self.num_yielded] = self.loader.state_dict()
            self._states.pop(self.num_yielded - NUM_KEPT_STATES, None)
            yield batch

    def place_after(self, num: int) -> dict[str, Any]:
        """Return the place after so many batches of this pass, as plain data."""
        return {"batches": num, "state": self._states[num], "epoch": self.shared.epoch, "layout": self.layout}

    def resume_at(self, place: dict[str, Any]) -> None:
        """Let the next pass begin at a place.

        Raises:
            ConfigError: other ranks or workers have other parts of the stream.
        """
        if place["layout"] != self.layout:
            (num_ranks, num_workers), name = place["layout"], type(self.dataset).__name__
            rule = f"must stay {num_ranks} data-parallel ranks with {num_workers} workers each, in an epoch of a stream"
            fix = "the devices and workers as before, until this epoch has ended"
            raise ConfigError("trainer.devices", f"{self.num_ranks} and {self.num_workers} for {name}", rule, fix)
        self._to_load = place

    def first_checksum(self) -> int | None:
        """Return a checksum of the first sample that this rank has read in this pass; None: there was none."""
        firsts = (part["first"] for part in self._parts())
        return next((first for first in firsts if first is not None), None)

    def reject_unasked(self) -> None:
        """Check that a stream that is to split itself by workers asks for them. Call this after its first batch.

        Raises:
            ConfigError: `stream_splits` is `workers`, and it has not read `get_worker_info`.
        """
        parts = [part for part in self._parts() if part["read"]]
        if not parts or all(part["asked"] for part in parts) or self.num_ranks * max(1, self.num_workers) == 1:
            return
        name, rule = type(self.dataset).__name__, "has not called torch.utils.data.get_worker_info"
        if self.splits == WORKERS:
            rule = f"cannot be {WORKERS}, as {name} ({self.split}) {rule}: each part would read all of its samples"
            fix = f"data.stream_splits={NOTHING}, or {RANKS} if {name} splits its samples by the rank"
            raise ConfigError("data.stream_splits", None, rule, fix)
        if self.splits == RANKS and self.num_workers > 1 and self.shared.rank == 0 and not self.is_warned:
            self.is_warned = True
            fix = f"data.num_workers=1, or call it in {name}" if self.num_ranks > 1 else f"data.stream_splits={NOTHING}"
            print(f"warning: {name} ({self.split}) {rule}, so each of its {self.num_workers} workers may give the same "
                  f"samples. Try: {fix}", flush=True)  # fmt: skip

    def _parts(self) -> list[dict[str, Any]]:
        """Return the states of this rank's parts (`SharedIterator`), wherever torchdata keeps them."""
        return list(_find_parts(self._states.get(self.num_yielded)))

    def _describe(self, loader: Any) -> str:
        name, parts = type(self.dataset).__name__, self.num_ranks * max(1, self.num_workers)
        how = ""
        if parts > 1 and self.splits != NOTHING:
            how = f"it splits its samples among {parts} parts itself, by {self.splits}; "
        elif parts > 1:
            how = f"its samples are shared out in turns among {parts} parts; "
        resumed = "it is resumed by its own state_dict()"
        if not has_state(self.shared.stream):
            resumed = (
                "it has no state_dict() and load_state_dict(), so a resumed run reads it again up to its place, and "
            )
            resumed += "goes on with other samples if they follow from more than a seed: from the model, an environment"
        short_lived = ""
        if self._has_samples and loader.persistent_workers:
            short_lived = "; persistent_workers=False is set"
        return f"{self.split}: the stream {name}: {how}{resumed}{short_lived}"


def _find_parts(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict) and {"read", "asked", "first"} <= state.keys():
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _find_parts(value)


def _init_worker(init: Any, worker_id: int) -> None:
    """Call a loader's `worker_init_fn` with the stream's own dataset and worker, as `get_worker_info` shows them."""
    block_signals_in_worker(worker_id)  # the scheduler's warnings are for the ranks
    if init is not None:
        shared: Any = get_worker_info().dataset  # type: ignore[union-attr]
        shared.was_asked = True  # it may split the stream by the number that it is given
        with shared.as_worker() as number:
            init(number)


def is_map_style(loader: Any) -> bool:
    """Return whether a loader fetches its samples by index, in an order that has an end and can be listed."""
    is_own_kind = isinstance(loader, DataLoader) and type(loader).__iter__ in ITERATIONS
    if not is_own_kind or isinstance(loader.dataset, IterableDataset):
        return False
    return sized_len(loader.sampler if loader.batch_sampler is None else loader.batch_sampler) is not None


def stream_of(loader: Any) -> StreamLoader | None:
    """Return the loader of a stream, which `EvenBatches` may hold; None for another loader."""
    candidates = (loader, getattr(loader, "loader", None))
    return next((candidate for candidate in candidates if isinstance(candidate, StreamLoader)), None)
