"""Buffers of a module on several ranks: which of them all ranks take from rank 0, and when."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed import broadcast, distributed_c10d, get_rank
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase  # the one class that all batch and instance norms share
from torchmetrics import Metric

from hpc.config.errors import join_names

NORM_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}  # of a norm: only an evaluation reads them


def buffers_read_in_training(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return submodule and attribute of each buffer that training may read, by name: a queue, a codebook, a centre.

    These are all but the statistics of norms and the buffers of metrics.
    """
    metric_parts = {id(part) for metric in module.modules() if isinstance(metric, Metric) for part in metric.modules()}
    return {
        f"{prefix}.{name}".lstrip("."): (part, name)
        for prefix, part in module.named_modules()
        for name in part._buffers
        if id(part) not in metric_parts and not (isinstance(part, _NormBase) and name in NORM_STATISTICS)
    }


class BuffersReadInTraining:
    """The buffers of a module that training may read; prints their names once."""

    def __init__(self, module: Any) -> None:
        buffers = buffers_read_in_training(module)
        self.places = list(buffers.values())
        sparse = [
            name
            for name, (part, own) in buffers.items()
            if getattr(part._buffers[own], "layout", torch.strided) != torch.strided
        ]
        if buffers and module.trainer.is_global_zero:
            note = "all ranks take rank 0's buffers before each step, as training may read them"
            print(f"train: {note}: {join_names(list(buffers))}", flush=True)
        if sparse and module.trainer.is_global_zero:
            print(f"note: sparse buffers stay each rank's own: {join_names(sparse)}", flush=True)

    def broadcast(self) -> None:
        """Set them to rank 0's, on all ranks."""
        buffers = [part._buffers[name] for part, name in self.places]  # anew: the module may have set other tensors
        broadcast_together(filter(_is_broadcast, buffers))  # type: ignore[arg-type]


def broadcast_together(buffers: Iterable[Tensor]) -> None:
    """Set tensors to rank 0's, in one message for each type of numbers."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for buffer in buffers:
        groups[buffer.dtype, buffer.device].append(_without_repeats(buffer))
    for group in groups.values():
        together = torch.cat([buffer.detach().reshape(-1) for buffer in group])
        broadcast(together, 0)
        parts = together.split([buffer.numel() for buffer in group])
        for buffer, part in zip(group, parts, strict=True) if get_rank() else ():
            buffer.detach().copy_(part.view_as(buffer))


def _is_broadcast(buffer: Tensor | None) -> bool:
    """Return whether ranks can have rank 0's: of a DTensor they hold parts, and a sparse tensor may differ in size."""
    return buffer is not None and not isinstance(buffer, DTensor) and buffer.layout == torch.strided


def _without_repeats(buffer: Tensor) -> Tensor:
    """Return a view of an expanded tensor that holds each of its numbers once, as only that can be written to."""
    for dimension, stride in enumerate(buffer.stride()):
        if stride == 0:
            buffer = buffer.narrow(dimension, 0, 1)
    return buffer


class SyncsBuffers:
    """Mixin for a strategy of several ranks: they have the same buffers where it counts.

    Buffers that training may read become rank 0's before each step, as in plain Lightning. The others, which are those
    of batch norm, are each rank's own while it trains, and become rank 0's in an evaluation. A checkpoint holds rank
    0's buffers and each rank's differences. Saving leaves every rank's buffers unchanged.
    """

    lightning_module: Any
    syncs_each_step = True
    _read_in_training: BuffersReadInTraining | None = None

    def __init__(self, **options: Any) -> None:
        # Lightning read torch's default when it was imported, and would pass on that one.
        super().__init__(**{"timeout": distributed_c10d.default_pg_timeout} | options)

    def before_step(self) -> None:
        """Broadcast the buffers that training may read. Called on all ranks before each step of training."""
        if self.syncs_each_step:
            self._read_in_training = self._read_in_training or BuffersReadInTraining(self.lightning_module)
            self._read_in_training.broadcast()

    def on_validation_start(self) -> None:
        self.broadcast_buffers()

    def on_test_start(self) -> None:
        self.broadcast_buffers()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        replaced = self.broadcast_buffers()
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]
        put_back(replaced)

    def differing_buffers(self) -> dict[str, Tensor]:
        """Return the module's buffers on this rank that differ from rank 0's, by their names."""
        names = {id(buffer): name for name, buffer in self.lightning_module.named_buffers()}
        replaced = self.broadcast_buffers()
        put_back(replaced)
        return {names[id(buffer)]: value for buffer, value in replaced if id(buffer) in names}

    def broadcast_buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Set all buffers to rank 0's, on all ranks. Return those that changed here, each with its old value."""
        averages = _buffers_of_averages(self.lightning_module.trainer)
        buffers = [
            _without_repeats(item) for item in (*self.lightning_module.buffers(), *averages) if _is_broadcast(item)
        ]
        old_values = [buffer.clone() for buffer in buffers]
        broadcast_together(buffers)
        pairs = zip(buffers, old_values, strict=True)
        return [(buffer, old_value) for buffer, old_value in pairs if not torch.equal(old_value, buffer)]


def put_back(replaced: list[tuple[Tensor, Tensor]]) -> None:
    """Set each buffer to the value beside it."""
    for buffer, value in replaced:
        buffer.copy_(value)


def _buffers_of_averages(trainer: Any) -> list[Tensor]:
    """Return the buffers of the averages. While it trains, each rank has its own, like those of the module."""
    moving = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
    models = [callback._average_model.module for callback in moving if callback._average_model]
    return [buffer for model in models for buffer in model.buffers()]
