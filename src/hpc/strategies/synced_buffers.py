"""Buffers of a module on several ranks: all ranks have rank 0's, as in plain Lightning, also where it shards."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed import broadcast, get_rank
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from hpc.config.errors import join_names
from hpc.privates.lightning import average_of
from hpc.privates.torch import own_buffers


class SyncsBuffers:
    """Mixin for a strategy of several ranks: they take rank 0's buffers before each step, evaluation and checkpoint.

    So do the averages of weights. Buffers of metrics stay each rank's own, as a metric sums them over the ranks itself.
    """

    lightning_module: Any

    def before_step(self) -> None:
        """Called on all ranks before each step of training."""
        self.sync_buffers()

    def on_validation_start(self) -> None:
        self.sync_buffers()

    def on_test_start(self) -> None:
        self.sync_buffers()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.sync_buffers()
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def sync_buffers(self) -> None:
        """Set the buffers to rank 0's. Called on all ranks."""
        buffers = [
            own_buffers(part)[name] for part, name in self._places
        ]  # anew: the module may have set other tensors
        broadcast_together(filter(_is_broadcast, buffers))  # type: ignore[arg-type]

    @cached_property
    def _places(self) -> list[tuple[nn.Module, str]]:
        """Return the part and the attribute of each buffer, and print which stay a rank's own."""
        module, trainer = self.lightning_module, self.lightning_module.trainer
        metrics = {id(part) for metric in module.modules() if isinstance(metric, Metric) for part in metric.modules()}
        callbacks = [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
        averages = [average for callback in callbacks if (average := average_of(callback))]
        places = [
            (part, name)
            for network in (module, *averages)
            for part in network.modules()
            for name in own_buffers(part)
            if id(part) not in metrics
        ]
        sparse = [name for name, buffer in module.named_buffers() if buffer.layout != torch.strided]
        if sparse and trainer.is_global_zero:
            print(f"note: sparse buffers stay each rank's own: {join_names(sparse)}", flush=True)
        return places


def broadcast_together(buffers: Iterable[Tensor]) -> None:
    """Set tensors to rank 0's, in one message for each device."""
    groups: dict[torch.device, list[Tensor]] = defaultdict(list)
    for buffer in sorted(buffers, key=Tensor.element_size, reverse=True):  # so that each is aligned in the message
        groups[buffer.device].append(_without_repeats(buffer.detach()))
    for group in groups.values():
        together = torch.cat([buffer.reshape(-1).view(torch.uint8) for buffer in group])
        broadcast(together, 0)
        parts = together.split([buffer.numel() * buffer.element_size() for buffer in group])
        for buffer, part in zip(group, parts, strict=True) if get_rank() else ():
            buffer.copy_(part.view(buffer.dtype).view_as(buffer))


def _is_broadcast(buffer: Tensor | None) -> bool:
    """Return whether ranks can have rank 0's: of a DTensor they hold parts, and a sparse tensor may differ in size."""
    return buffer is not None and not isinstance(buffer, DTensor) and buffer.layout == torch.strided


def _without_repeats(buffer: Tensor) -> Tensor:
    """Return a view of an expanded tensor that holds each of its numbers once, as only that can be written to."""
    for dimension, stride in enumerate(buffer.stride()):
        if stride == 0:
            buffer = buffer.narrow(dimension, 0, 1)
    return buffer
