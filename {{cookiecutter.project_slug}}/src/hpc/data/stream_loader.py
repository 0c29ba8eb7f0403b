"""Loaders of streams: shared out among ranks and workers, resumed at the very sample, of unknown length too.

torchdata's StatefulDataLoader fetches the samples and asks the workers for their state after each batch.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hpc.config.errors import ConfigError
from hpc.data.stream_sharing import SharedStream, has_state, prepare_stream

NUM_KEPT_STATES = 4  # the batch in use, those that Lightning has fetched ahead, and the one before them
# Arguments of a DataLoader that stay.
KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
KEPT += ("generator", "prefetch_factor")


class StreamLoader:
    """A rank's part of a loader without indices, which keeps its state after each of the last batches.

    Args:
        loader: a DataLoader of an IterableDataset, or any iterable of batches.

    Attributes:
        dataset: the researcher's stream.
        num_yielded: batches of this pass, those before a resume included.
        note: what to print once.
    """

    def __init__(self, loader: Any, *, rank: int, num_ranks: int, seed: int, split: str) -> None:
        has_samples = isinstance(getattr(loader, "dataset", None), IterableDataset) and isinstance(loader, DataLoader)
        self.dataset = loader.dataset if has_samples else loader
        self.batch_size = loader.batch_size if has_samples else None
        stream, splits_ranks = prepare_stream(self.dataset, rank=rank, num_ranks=num_ranks)
        self.shared = SharedStream(stream, rank=rank, num_ranks=num_ranks, splits_ranks=splits_ranks, seed=seed)
        options: dict[str, Any] = {"collate_fn": _as_it_is}
        if has_samples:
            options = {name: getattr(loader, name) for name in KEPT}
        # Each pass draws a seed for its workers, and a resumed run makes more passes; here no sample depends on it.
        options["generator"] = options.get("generator") or torch.Generator().manual_seed(seed)
        warnings.filterwarnings("ignore", ".*set_vital")  # torchdata calls what torch has deprecated
        sizes = {"batch_size": self.batch_size, "drop_last": has_samples and loader.drop_last}
        self.loader: Any = StatefulDataLoader(self.shared, **sizes, **options)
        self.num_workers, self.layout = self.loader.num_workers, [num_ranks, self.loader.num_workers]
        self.num_ranks, self.split = num_ranks, split
        self._length = sized_len(loader)
        self.num_yielded = 0
        self._states: dict[int, Any] = {}
        self._to_load: dict[str, Any] = {}
        self.note = self._describe(loader, splits_ranks=splits_ranks)

    @property
    def sampler(self) -> "StreamLoader":
        """Return what Lightning calls `set_epoch` of."""
        return self

    def set_epoch(self, epoch: int) -> None:
        self.shared.epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches that the stream promises each rank. Raises `TypeError` if it promises none."""
        if self._length is None:
            raise TypeError("the length of this stream is unknown")
        return self._length // self.shared.num_ranks

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

    def _describe(self, loader: Any, *, splits_ranks: bool) -> str:
        name, parts = type(self.dataset).__name__, self.num_ranks * max(1, self.num_workers)
        how = ""
        if self.num_ranks > 1:
            how = f"shared out among {self.num_ranks} ranks"
            how += ", as it does it itself; " if splits_ranks else f" in {parts} parts; "
        resumed = "it is resumed by its own state_dict()"
        if not has_state(self.shared.stream):
            resumed = "it has no state_dict(), so a resumed run reads it again up to its place"
        short_lived = "; persistent_workers=False is set" if getattr(loader, "persistent_workers", False) else ""
        return f"{self.split}: the stream {name}: {how}{resumed}{short_lived}"


def stream_of(loader: Any) -> StreamLoader | None:
    """Return the loader of a stream, which `EvenBatches` may hold; None for another loader."""
    candidates = (loader, getattr(loader, "loader", None))
    return next((candidate for candidate in candidates if isinstance(candidate, StreamLoader)), None)


def _as_it_is(batch: Any) -> Any:
    return batch
