"""Buffers that training itself may read, as a queue, a codebook or a centre: on several ranks all take rank 0's."""

from typing import Any

from torch import nn
from torch.distributed import broadcast
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase  # the one class that all batch and instance norms share
from torchmetrics import Metric

STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}  # of a norm: only an evaluation reads them
SHOWN = 4  # names of buffers


def read_in_training(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Where these are, by name: all but the statistics of norms and what belongs to metrics."""
    of_metrics = {id(part) for metric in module.modules() if isinstance(metric, Metric) for part in metric.modules()}
    return {
        f"{prefix}.{name}".lstrip("."): (part, name)
        for prefix, part in module.named_modules()
        for name in part._buffers
        if id(part) not in of_metrics and not (isinstance(part, _NormBase) and name in STATISTICS)
    }


class Followed:
    """Shares rank 0's with all ranks; tells once which they are."""

    def __init__(self, module: Any) -> None:
        names = read_in_training(module)
        self.places = list(names.values())
        if names and module.trainer.is_global_zero:
            shown = ", ".join([*names][:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            said = "all ranks take rank 0's buffers before each step, as training may read them"
            print(f"train: {said}: {shown}", flush=True)

    def share(self) -> None:
        for part, name in self.places:
            buffer = part._buffers[name]  # another tensor, where it was set anew
            if buffer is not None and not isinstance(buffer, DTensor):  # whose ranks hold parts, or copies alike
                broadcast(buffer, 0)
