"""Check that ranks get rank 0's buffers, in one message and of any kind."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import WeightAveraging
from torch import nn
from torchmetrics import MeanMetric

from hpc.strategies import synced_buffers


class Holder(nn.Module):
    """A module with buffers of many kinds, whose numbers are those of a rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.trainer = SimpleNamespace(is_global_zero=rank == 0, callbacks=[])
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("flag", torch.tensor([rank == 0, rank == 1]))
        self.register_buffer("expanded", torch.full((3, 1), float(rank)).expand(3, 4))
        self.register_buffer("transposed", (torch.arange(6.0).reshape(2, 3) + rank).T)
        self.register_buffer("sparse", torch.eye(2).mul(rank + 1).to_sparse())
        self.metric = MeanMetric()
        self.metric.register_buffer("own", torch.tensor(rank))
        for number in range(20):
            self.register_buffer(f"queue{number}", torch.full((5,), float(rank)))
            self.register_buffer(f"place{number}", torch.tensor(rank + number))


class Strategy(synced_buffers.SyncsBuffers):
    def __init__(self, module: Any) -> None:
        self.lightning_module = module


def sync(rank: int) -> list[Any]:
    messages: list[Any] = []
    module, broadcast = Holder(rank), dist.broadcast
    synced_buffers.broadcast = lambda tensor, source: messages.append(1) or broadcast(tensor, source)
    module.trainer.callbacks = [average := WeightAveraging()]
    average._average_model = SimpleNamespace(module=nn.BatchNorm1d(1))
    average._average_model.module.running_mean.fill_(rank)
    Strategy(module).before_step()
    buffers = {**dict(module.named_buffers()), "average": average._average_model.module.running_mean}
    return [len(messages), {name: buffer.to_dense().tolist() for name, buffer in buffers.items()}]


@pytest.mark.slow
def test_ranks_get_the_buffers_of_rank_0_in_one_message(together: Callable[..., list[Any]]) -> None:
    (num_messages, first), (_, second) = together(sync, 2)
    assert num_messages == 1, "for all types of numbers: bool, int64 and float32"
    assert first.pop("sparse") != second.pop("sparse"), "it is each rank's own"
    assert (first.pop("metric.own"), second.pop("metric.own")) == (0, 1), "a metric sums it over the ranks itself"
    assert first == second and second["average"] == [0.0]
    assert second["expanded"] == [[0.0] * 4] * 3 and second["transposed"] == [[0, 3], [1, 4], [2, 5]]
