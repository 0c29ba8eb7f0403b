"""A LightningModule around one network, which any strategy can shard, compile and clip, and which costs little a step.

Optional: every LightningModule can be trained.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
from torch import nn
from torch.optim import Optimizer

from hpc.training.parallel import clip_gradients


class NetworkModule(L.LightningModule):
    """Holds a network and lets the strategy change it. A subclass has the steps, `loss`, and the optimizers.

    Args:
        network: inputs → outputs.
        parallelize: (network, device mesh, loss) → None; what the strategy does to them, as the config says.
    """

    loss: nn.Module

    def __init__(self, network: nn.Module, *, parallelize: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.network = network
        self.parallelize = parallelize

    @property
    def backbone(self) -> nn.Module:
        """All but the head: what fine-tuning freezes first."""
        return nn.ModuleList(child for name, child in self.network.named_children() if name != "head")

    def configure_model(self) -> None:
        if self.parallelize is not None:
            self.parallelize(self.network, self.device_mesh, loss=self.loss)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        clip_gradients(self, optimizer, gradient_clip_val)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # set some forty times a step; nn.Module asks each time whether it is a weight
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)
