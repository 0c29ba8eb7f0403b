"""The LightningModule: loss, metrics, optimizer. It serves images and text alike: inputs → logits → cross-entropy."""

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from hpc.training.factor_schedule import FactorSchedule
from hpc.training.module import NetworkModule
from hpc.training.parallel import groups_by_mesh
from hpc.training.precise_mean import precise_mean

IGNORED = -100  # cross-entropy's own default: a target that counts for nothing


class Classifier(NetworkModule):
    """Trains a network to name the class: of an image, or of the next token.

    Args:
        network: inputs → logits, classes on the last dimension.
        optimizer: parameter groups → optimizer.
        parallelize: (network, device mesh, loss) → None; what the strategy does to them, as the config says.
        warmup_steps: optimizer steps of linear warm-up before the cosine decay to zero.
        bytes_per_token: for text, how many bytes a target stands for: reports bits per byte instead of accuracy.

    Raises:
        ValueError: `warmup_steps` is below 0.
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
            raise ValueError(f"warmup_steps must be at least 0, not {warmup_steps}")
        self.loss = nn.CrossEntropyLoss()
        self.make_optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.bytes_per_token = bytes_per_token
        self.metric = "bits_per_byte" if bytes_per_token else "accuracy"
        self.means = nn.ModuleDict(
            {f"{stage}_{name}": precise_mean() for stage in ("val", "test") for name in ("loss", "metric")}
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss. A dict {"loss": loss, "train/...": scalar} makes a curve of each scalar."""
        inputs, targets = batch
        return self.loss(self(inputs).flatten(0, -2), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Weight decay for matrices only; linear warm-up, then a cosine to zero over the planned steps."""
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = self.make_optimizer(groups_by_mesh(groups))
        total = self.trainer.estimated_stepping_batches
        schedule = FactorSchedule(optimizer, lambda step: warmup_then_cosine(step, self.warmup_steps, total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        logits, targets = self(inputs).flatten(0, -2), targets.flatten()
        counted = targets != IGNORED
        count = counted.sum()
        loss = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED) / count.clamp(min=1)
        metric = loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else accuracy(logits, targets, count)
        for name, key, value in (("loss", "loss", loss), ("metric", self.metric, metric)):
            mean: Any = self.means[f"{stage}_{name}"]
            mean.update(value, weight=count)
            self.log(f"{stage}/{key}", mean, prog_bar=True, on_epoch=True, on_step=False)


def accuracy(logits: Tensor, targets: Tensor, count: Tensor) -> Tensor:
    """Share of right classes among `count` targets that count. logits (n, classes), targets (n,)."""
    return (logits.argmax(dim=-1) == targets).sum() / count.clamp(min=1)


def warmup_then_cosine(step: int, warmup_steps: int, total_steps: float) -> float:
    """Factor on the learning rate at an optimizer step, in [0, 1]."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1.0, total_steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
