"""Loaders that may have different numbers of batches on each rank, so that ranks would wait for each other for ever.

In training all ranks end an epoch together, with the first that has no batch left. In an evaluation a rank that is done
gets its last batch again until all are done, and computes along without a trace.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len

END = object()


class EvenBatches:
    """A loader on one of several ranks, which yields equally many batches on all of them.

    Args:
        group: of all ranks, on the host.
        repeats_last: give the last batch again until all ranks are done; False: end with the first one that is done.

    Attributes:
        num_own: batches that this rank has in this pass; None: it is not done yet.
    """

    def __init__(self, loader: Any, *, group: Any, repeats_last: bool) -> None:
        self.loader, self.group, self.repeats_last = loader, group, repeats_last
        self.num_own: int | None = None
        self._has_noted_rest = False
        length = sized_len(loader)
        self._length = None if length is None else self._over_ranks(length)
        if not repeats_last and length != self._length:  # Lightning asks for no batch beyond the length
            self._note_rest(self._length, is_left=True)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # missing in a copy that is being made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the length of this loader is unknown")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        self.num_own, number, batch = None, 0, END
        batches = iter(self.loader)
        while True:
            own = next(batches, END) if self.num_own is None else END
            if not self._over_ranks(int(own is not END)):
                self._note_rest(number, is_left=own is not END)
                return
            if own is END and self.num_own is None:
                self.num_own = number
            if number == 0 and batch is END:
                batch = self._first_batch(own)
            number, batch = (number, batch) if own is END else (number + 1, own)
            yield batch

    def is_own(self, batch_idx: int) -> bool:
        """Return whether a batch is this rank's, and not one with which it only computes along."""
        return self.num_own is None or batch_idx < self.num_own

    def _over_ranks(self, number: int) -> int:
        """Return the largest number of all ranks; of a training the smallest."""
        tensor = torch.tensor([number])
        dist.all_reduce(tensor, dist.ReduceOp.MAX if self.repeats_last else dist.ReduceOp.MIN, group=self.group)
        return int(tensor)

    def _note_rest(self, number: int | None, *, is_left: bool) -> None:
        """Print once that an epoch of training has ended before this rank's last batch."""
        if is_left and not self._has_noted_rest:
            self._has_noted_rest = True
            note = f"rank {dist.get_rank()} has batches left after {number}, when another rank has none"
            print(f"note: {note}: all ranks end the epoch there", flush=True)

    def _first_batch(self, own: Any) -> Any:
        """Return the first batch, which a rank without any takes from another one to compute along. Called by all."""
        has_batch = torch.tensor([int(own is not END)])
        has_batches = [torch.zeros_like(has_batch) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(has_batches, has_batch, group=self.group)
        if all(has_batches):
            return own
        shared = [None if own is END else own]
        dist.broadcast_object_list(shared, int(torch.cat(has_batches).argmax()), group=self.group)
        return shared[0] if own is END else own
