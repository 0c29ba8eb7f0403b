"""Buffers of a module on several ranks: which of them all ranks take from rank 0, and when."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import broadcast, distributed_c10d
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase  # the one class that all batch and instance norms share
from torchmetrics import Metric

from hpc.training import weight_averaging
from hpc.training.shown_names import join_names

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
        if buffers and module.trainer.is_global_zero:
            note = "all ranks take rank 0's buffers before each step, as training may read them"
            print(f"train: {note}: {join_names(list(buffers))}", flush=True)

    def broadcast(self) -> None:
        """Set them to rank 0's, on all ranks."""
        for part, name in self.places:
            buffer = part._buffers[name]  # looked up anew: the module may have set another tensor
            if buffer is not None and not isinstance(buffer, DTensor):  # ranks hold parts of it, or equal copies
                broadcast(buffer, 0)


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
        replaced = []
        averages = weight_averaging.buffers_of_averages(self.lightning_module.trainer)
        for buffer in (*self.lightning_module.buffers(), *averages):
            if not isinstance(buffer, DTensor):  # ranks hold parts of it, or equal copies
                old_value = buffer.clone()
                broadcast(buffer, 0)
                if not torch.equal(old_value, buffer):
                    replaced.append((buffer, old_value))
        return replaced


def put_back(replaced: list[tuple[Tensor, Tensor]]) -> None:
    """Set each buffer to the value beside it."""
    for buffer, value in replaced:
        buffer.copy_(value)
