"""The LightningModule: loss, metrics and optimizer of a classifier, for images and for text."""

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from hpc.training.factor_schedule import FactorSchedule
from hpc.training.module import NetworkModule
from hpc.training.parallel import split_groups_by_mesh
from hpc.training.precise_mean import precise_mean

IGNORED_TARGET = -100  # torch's default: such a target counts neither in the loss nor in a metric


class Classifier(NetworkModule):
    """Train a network with cross-entropy to predict the class of an image, or the next token of a text.

    Args:
        network: inputs → logits, with the classes in the last dimension.
        optimizer: parameter groups → optimizer.
        parallelize: (network, device mesh, loss) → None; applies the strategy of the config to the network.
        warmup_steps: optimizer steps of linear warm-up, before a cosine decay to zero.
        bytes_per_token: mean number of bytes of a token; if given, bits per byte are logged instead of the accuracy.

    Raises:
        ValueError: `warmup_steps` is negative.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: Callable[[Any], Optimizer],
        *,
        parallelize: Callable[..., None] | None = None,
        warmup_steps: int = 0,
        bytes_per_token: float | None = None,
    ) -> None:
        super().__init__(network, parallelize=parallelize)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0; got {warmup_steps}")
        self.loss = nn.CrossEntropyLoss()
        self.make_optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.bytes_per_token = bytes_per_token
        self.metric_name = "bits_per_byte" if bytes_per_token else "accuracy"
        self.means = nn.ModuleDict(
            {f"{stage}_{name}": precise_mean() for stage in ("val", "test") for name in ("loss", "metric")}
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss. To log more, return a dict: {"loss": loss, "train/...": scalar} draws a curve per scalar."""
        inputs, targets = batch
        return self.loss(self(inputs).flatten(0, -2), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer, with weight decay for matrices only, and its schedule of linear warm-up and cosine."""
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = self.make_optimizer(split_groups_by_mesh(groups))
        total_steps = self.trainer.estimated_stepping_batches
        schedule = FactorSchedule(optimizer, lambda step: warmup_then_cosine(step, self.warmup_steps, total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        """Log the loss and the metric of a batch, weighted by its number of targets that are not ignored."""
        inputs, targets = batch
        logits, targets = self(inputs).flatten(0, -2), targets.flatten()
        num_targets = (targets != IGNORED_TARGET).sum()
        loss_sum = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED_TARGET)
        loss = loss_sum / num_targets.clamp(min=1)
        if self.bytes_per_token:
            metric = loss / math.log(2) / self.bytes_per_token
        else:
            metric = accuracy(logits, targets, num_targets)
        for kind, name, value in (("loss", "loss", loss), ("metric", self.metric_name, metric)):
            mean: Any = self.means[f"{stage}_{kind}"]
            mean.update(value, weight=num_targets)
            self.log(f"{stage}/{name}", mean, prog_bar=True, on_epoch=True, on_step=False)


def accuracy(logits: Tensor, targets: Tensor, num_targets: Tensor) -> Tensor:
    """Return the share of correct predictions among the targets that are not ignored.

    Args:
        logits: (n, classes).
        targets: (n,).
        num_targets: number of targets that are not ignored.
    """
    return (logits.argmax(dim=-1) == targets).sum() / num_targets.clamp(min=1)


def warmup_then_cosine(step: int, warmup_steps: int, total_steps: float) -> float:
    """Return the factor of the learning rate at an optimizer step, in [0, 1]."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
