"""The LightningModule: loss, metrics and optimizer of a classifier, for images and for text."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hpc.strategies.gradients import split_groups_by_mesh
from hpc.training.module import InitialGroupsLambdaLR, NetworkModule, make_float64_mean_metric
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

IGNORED_TARGET = -100  # torch's default: such a target counts neither in the loss nor in a metric


class Classifier(NetworkModule):
    """Train a network with cross-entropy to predict the class of an image, or the next token of a text.

    NetworkModule keeps `self.network`, and clips gradients to `trainer.gradient_clip_val`, also where they are sharded.

    Args:
        network: inputs → logits, with the classes in the last dimension.
        optimizer: a function that makes one from parameter groups (`_partial_: true` in configs/model).
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
        warmup_steps: int = 0,
        bytes_per_token: float | None = None,
    ) -> None:
        super().__init__(network)
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0; got {warmup_steps}")
        # A module, so that it can be compiled. To change the loss, change `_evaluate`, too: it repeats the loss.
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED_TARGET)
        self.make_optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.bytes_per_token = bytes_per_token
        self.metric_name = "bits_per_byte" if bytes_per_token else "accuracy"
        # In float64, so that the result does not depend on the number of ranks.
        means = ("val_loss", "val_metric", "test_loss", "test_metric")
        self.means = nn.ModuleDict({name: make_float64_mean_metric() for name in means})

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss, which hpc logs as step/loss.

        Further scalars of a returned dict are logged, too: {"loss": loss, "error": scalar} as step/error.
        """
        inputs, targets = batch
        # A text has logits (batch, time, classes) and targets (batch, time): each token is a sample of its own. For
        # images, (batch, classes), this changes nothing.
        return self.loss(self(inputs).flatten(0, -2), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the predicted classes, which `task=predict` writes to a file."""
        return self(batch[0]).argmax(dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer and its schedule: linear warm-up, then a cosine decay.

        Weight decay is for parameters of two or more dimensions: not for biases and norms.
        """
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim >= 2]},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        # Under tensor parallelism, fused optimizers need a group per device mesh; otherwise the groups stay the same.
        optimizer = self.make_optimizer(split_groups_by_mesh(groups))
        total_steps = self.trainer.estimated_stepping_batches
        # Groups that fine-tuning adds later keep the learning rate that it gives them.
        schedule = InitialGroupsLambdaLR(
            optimizer, lambda step: warmup_then_cosine(step, self.warmup_steps, total_steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def example_batch(self, num_examples: int) -> tuple[Tensor, Tensor] | None:
        """Return a blank batch, with which plan.py needs no data; None if the network has no `example_input`."""
        make_inputs: Any = getattr(self.network, "example_input", None)
        if make_inputs is None:
            return None
        inputs = make_inputs(num_examples)
        is_text = not inputs.is_floating_point()
        return inputs, torch.zeros_like(inputs) if is_text else torch.zeros(num_examples, dtype=torch.int64)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        """Log the loss and the metric (`metric_name`) over all targets that are not ignored."""
        inputs, targets = batch
        logits, targets = self(inputs).flatten(0, -2), targets.flatten()
        num_targets = (targets != IGNORED_TARGET).sum()
        # The same loss as self.loss, as a mean over the targets that count; 0 if there are none.
        loss_sum = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED_TARGET)
        loss = loss_sum / num_targets.clamp(min=1)
        if self.bytes_per_token:
            metric = loss / math.log(2) / self.bytes_per_token
        else:
            metric = accuracy(logits, targets, num_targets)
        self._log_mean(f"{stage}/loss", self.means[f"{stage}_loss"], loss, num_targets)
        self._log_mean(f"{stage}/{self.metric_name}", self.means[f"{stage}_metric"], metric, num_targets)

    def _log_mean(self, name: str, mean: Any, value: Tensor, num_targets: Tensor) -> None:
        """Add the value of a batch, weighted by its number of targets, to a mean over all batches, and log the mean."""
        mean.update(value, weight=num_targets)
        self.log(name, mean, prog_bar=True, on_epoch=True, on_step=False)


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
