"""Loaders that may have different numbers of batches on each rank, so that ranks would wait for each other for ever.

In training all ranks end an epoch together, with the first that has no batch left. In an evaluation a rank that is done
gets its last batch again until all are done; `suppressed` keeps what it then computes out of all metrics and logs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torchmetrics import Metric, MetricCollection

from hpc.config.errors import ConfigError

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
                return
            if own is not END:
                number, batch = number + 1, own
            elif self.num_own is None:
                self.num_own = number
                if batch is END:
                    raise self._no_batch_error()
            yield batch

    def _over_ranks(self, number: int) -> int:
        """Return the largest number of all ranks; of a training the smallest."""
        tensor = torch.tensor([number])
        dist.all_reduce(tensor, dist.ReduceOp.MAX if self.repeats_last else dist.ReduceOp.MIN, group=self.group)
        return int(tensor)

    def _no_batch_error(self) -> ConfigError:
        name = type(getattr(self.loader, "dataset", self.loader)).__name__
        rule = "Each rank must get a batch in an evaluation, or sharded networks would wait for it for ever"
        return ConfigError("data", name, rule, "more samples, smaller batches, or fewer devices", only_this_rank=True)


@contextmanager
def suppressed(module: Any) -> Iterator[None]:
    """Let a step of a module compute, but neither log nor update metrics, nor grow the lists that it keeps."""
    lists = {name: len(value) for name, value in vars(module).items() if isinstance(value, list)}
    metrics = [part for part in module.modules() if isinstance(part, Metric | MetricCollection)]
    with ExitStack() as stack:
        for name in ("log", "log_dict"):
            stack.enter_context(patch.object(module, name, _do_nothing))
        for metric in metrics:
            for name in ("update", "forward"):
                stack.enter_context(patch.object(metric, name, _do_nothing))
        yield
    for name, length in lists.items():
        del vars(module)[name][length:]


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for what a suppressed step must not do."""
