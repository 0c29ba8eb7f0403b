"""Loaders that may have different numbers of batches on each rank, so that ranks would wait for each other for ever.

In training all ranks end an epoch together, with the first that has no batch left. In an evaluation a rank that is done
gets its last batch again until all are done; `suppressed` keeps what it then computes out of all metrics and logs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torchmetrics import Metric, MetricCollection

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

    def _over_ranks(self, number: int) -> int:
        """Return the largest number of all ranks; of a training the smallest."""
        tensor = torch.tensor([number])
        dist.all_reduce(tensor, dist.ReduceOp.MAX if self.repeats_last else dist.ReduceOp.MIN, group=self.group)
        return int(tensor)

    def _note_rest(self, number: int, *, is_left: bool) -> None:
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


@contextmanager
def suppressed(module: Any, *, has_logged: bool = True) -> Iterator[None]:
    """Let a step of a module compute, but neither log nor update metrics, nor grow the lists that it keeps.

    Args:
        has_logged: this rank has logged in a step of its own. Otherwise the names are logged with no weight, as all
            ranks must reduce the same ones.
    """
    lists = {name: len(value) for name, value in vars(module).items() if isinstance(value, list)}
    metrics = [part for part in module.modules() if isinstance(part, Metric | MetricCollection)]
    with ExitStack() as stack:
        log = _do_nothing if has_logged else partial(_log_without_weight, module.log)
        stack.enter_context(patch.object(module, "log", log))  # log_dict calls it
        for metric in metrics:
            stack.enter_context(patch.object(metric, "update", _do_nothing))
            stack.enter_context(patch.object(metric, "forward", partial(_zeros, metric, module.device)))
        yield
    for name, length in lists.items():
        del vars(module)[name][length:]


def _zeros(metric: Metric | MetricCollection, device: torch.device, *args: Any, **kwargs: Any) -> Any:
    """Return values in the form in which a metric returns them."""
    zero = torch.zeros((), device=device)
    return dict.fromkeys(metric.keys(), zero) if isinstance(metric, MetricCollection) else zero


def _log_without_weight(log: Any, *args: Any, **kwargs: Any) -> None:
    log(*args, **kwargs | {"batch_size": 0})


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for what a suppressed step must not do."""
