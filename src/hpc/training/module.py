"""A LightningModule around one network, whose gradients any strategy can clip, and that costs little per step.

It is optional: every LightningModule can be trained. Beside it are a schedule and a metric for such modules.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric

from hpc.privates.lightning import CURRENT_HOOK
from hpc.strategies.gradients import clip_gradients


class NetworkModule(L.LightningModule):
    """Holds a network. A subclass has the steps and the optimizers; a `loss` that is a module is compiled, too.

    Args:
        network: inputs → outputs.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def backbone(self) -> nn.Module:
        """Return all parts but the head: what fine-tuning freezes first."""
        return nn.ModuleList(child for name, child in self.network.named_children() if name != "head")

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        clip_gradients(self, optimizer, gradient_clip_val)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == CURRENT_HOOK:  # which nn.Module would check each time
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)


class InitialGroupsLambdaLR(LambdaLR):
    """LambdaLR for the initial param groups; groups added later keep their own learning rate."""

    def get_lr(self) -> list[float | Tensor]:
        scheduled = super().get_lr()
        return [*scheduled, *(group["lr"] for group in self.optimizer.param_groups[len(scheduled) :])]


def make_float64_mean_metric() -> Any:
    """Return a float64 MeanMetric: a float32 sum depends on the number of ranks and loses large token counts."""
    return MeanMetric().set_dtype(torch.float64)
