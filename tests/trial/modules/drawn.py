"""A tiny module that records each step: src/my_research/drawn.py of a baked project."""

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils
from torchmetrics import MeanMetric

from hpc.strategies.gradients import clip_gradients
from my_research.changed_weights import WAYS
from my_research.drawn_data import CLASSES, FEATURES, schedule
from my_research.trace import write

CHANGING = (  # hooks that change targets
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_epoch_end",
)  # fmt: skip


class Network(nn.Module):
    """A network of about a hundred weights."""

    def __init__(self, width: int = 8, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(FEATURES, width), nn.Linear(width, width)]
        norms = [nn.BatchNorm1d(width) if norm else nn.Identity() for _ in layers]
        made = [nn.Sequential(a, b, nn.Tanh(), nn.Dropout(dropout)) for a, b in zip(layers, norms, strict=True)]
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(width, CLASSES)

    def example_input(self, num: int) -> Tensor:
        return torch.zeros(num, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recent:
    """A user-defined object with state that is not a tensor."""

    def __init__(self, network: nn.Module) -> None:
        self.losses: deque[float] = deque(maxlen=3)
        self.mean = np.zeros(1)
        self.average = deepcopy(network.head)


class Drawn(L.LightningModule):
    """A module with one optimizer, or with one for the blocks and one for the head (`manual`).

    Args:
        optimizers: {"name", ...} with "schedulers": [{"name", ..., "config": {...}}].
        logs: "step", "epoch", "both" or "metric": how a training metric is logged; None: not at all.
        every: with manual optimization, batches between two steps.
        own_clip: the gradients are clipped by the project's function, not by Lightning's.
        keeps: the module has state beside its weights, and the loss depends on it. It has a value that is set at the
            start of each epoch, and a list of the epoch's losses. It has a non-persistent buffer, a persistent one, and
            one that counts batches. It has a random generator, and an object of a user-defined class. On one device it
            also has an average outside the module, and a parameter without a gradient.
        targets: ways of changing weights, and the hooks that do it: an average of the head for each, and a
            parameter without dimensions that is trained.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizers: list[dict[str, Any]],
        *,
        manual: bool = False,
        every: int = 1,
        logs: str | None = None,
        own_clip: bool = False,
        keeps: bool = False,
        is_shared: bool = False,
        targets: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__()
        self.network, self.wanted, self.every, self.logs = network, optimizers, every, logs
        self.automatic_optimization = not manual
        self.is_shared, self.own_clip = is_shared, own_clip
        self.mean = MeanMetric()
        self.keeps, self.temperature, self.outputs = keeps, 1.0, []
        self.generator, self.recent = np.random.default_rng(5), Recent(network)
        if keeps and not is_shared:
            self.spare = nn.Parameter(torch.zeros(2))
        self.targets = nn.ModuleDict({f"{way}-{hook}": deepcopy(network.head) for way, hook in targets})
        self.targets.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0)) if targets else None
        self.register_buffer("smooth", torch.zeros(()), persistent=False)
        self.register_buffer("lasting", torch.zeros(()))
        self.register_buffer("transferred", torch.zeros(()))

    @property
    def backbone(self) -> nn.Module:
        return self.network.blocks  # type: ignore[return-value]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.own_clip:
            clip_gradients(self, optimizer, gradient_clip_val)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_train_epoch_start(self) -> None:
        if self.keeps:
            self.temperature = 1 / (1 + self.current_epoch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.keeps and self.training:
            self.transferred += 1
        return batch

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        inputs, numbers = batch
        outputs = self.network(inputs) if self.scale is None else self.scale * self.network(inputs)
        loss = F.cross_entropy(outputs, numbers % CLASSES)
        if self.keeps:
            loss = self.temperature * loss * (1 + self.smooth + self.lasting) * self._from_what_was(inputs)
            seen = loss.detach().clamp(max=1.0)  # otherwise the loss would amplify itself
            self.smooth = (0.9 * self.smooth + 0.1 * seen).to(self.smooth)
            self.lasting.copy_(self.smooth)
            self.outputs.append(loss.detach())
        rates = [group["lr"] for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        if self.trainer.strategy.share:  # else this rank has no sample, and only computes along
            self._write("train", batch_idx, numbers, loss, rates=[float(rate) for rate in rates])
        if not self.automatic_optimization:
            self._step_by_hand(loss, batch_idx)
        if self.logs == "metric":
            self.mean.update(loss.detach(), weight=len(numbers))
            self.log("own/metric", self.mean, on_step=False, on_epoch=True)
        elif self.logs:
            each, whole = self.logs != "epoch", self.logs != "step"
            self.log("own/loss", loss.detach(), on_step=each, on_epoch=whole, sync_dist=self._is_watched())
        return loss

    def _is_watched(self) -> bool:
        """Return whether a scheduler monitors the training metric, which must then be equal on all ranks."""
        schedules = [one for wanted in self.wanted for one in wanted["schedulers"]]
        return any(str(one.get("config", {}).get("monitor")).startswith("own/loss") for one in schedules)

    def _from_what_was(self, inputs: Tensor) -> float:
        """Return a factor near 1 that depends on the state of `recent` and of the generator."""
        recent, head = self.recent, self.network.head
        with torch.no_grad():
            if not self.is_shared:  # only on one device: otherwise the head may be sharded
                for mine, its in zip(recent.average.parameters(), head.parameters(), strict=True):
                    mine.lerp_(its.to(mine), 0.1)
            average = float(sum(one.sum() for one in recent.average.parameters()))
        recent.losses.append(average)
        recent.mean += 0.1 * (np.mean(recent.losses) - recent.mean)
        return 1 + 0.01 * float(self.generator.random() + np.tanh(recent.mean[0]))

    def _step_by_hand(self, loss: Tensor, batch_idx: int) -> None:
        optimizers, schedules = self.optimizers(), self.lr_schedulers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules if isinstance(schedules, list) else [schedules] if schedules else []:
                if not isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                    schedule.step()  # type: ignore[call-arg]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        name = "val/loss" if dataloader_idx == 0 else "val/other"
        self._evaluate("sanity" if self.trainer.sanity_checking else "val", name, batch, batch_idx, dataloader_idx)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", "test/loss", batch, batch_idx)

    def _evaluate(self, what: str, name: str, batch: Any, batch_idx: int, loader: int = 0) -> None:
        inputs, numbers = batch
        counted = (numbers >= 0).sum()
        # Negative numbers mark padding. Their remainder would be a valid class, so -100 is used, which is ignored.
        targets = torch.where(numbers >= 0, numbers % CLASSES, -100)
        loss = F.cross_entropy(self.network(inputs), targets, reduction="sum") / counted.clamp(min=1)
        self._write(what, batch_idx, numbers, loss, loader=loader)
        self.log(name, loss, on_epoch=True, batch_size=int(counted), sync_dist=True, add_dataloader_idx=False)

    def _write(self, what: str, batch_idx: int, numbers: Tensor, loss: Tensor, **more: Any) -> None:
        place = {"step": self.trainer.global_step, "epoch": self.trainer.current_epoch, "batch": batch_idx}
        write({"what": what, **place, "samples": numbers.tolist(), "loss": float(loss.detach()), **more})

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            metrics = {k: float(v) for k, v in self.trainer.callback_metrics.items() if k.startswith("val/")}
            place = {"step": self.trainer.global_step, "epoch": self.trainer.current_epoch}
            write({"what": "validated", **place, "metrics": metrics})

    def on_train_epoch_end(self) -> None:
        if self.keeps:
            self.log("own/kept", torch.stack(self.outputs).mean())
            self.log("own/transferred", self.transferred.clone())
            self.outputs.clear()

    def configure_optimizers(self) -> Any:
        parts = [self.network] if len(self.wanted) == 1 else [self.network.blocks, self.network.head]
        made, schedules = [], []
        for part, wanted in zip(parts, self.wanted, strict=True):
            wanted = dict(wanted)
            name, wishes = wanted.pop("name"), wanted.pop("schedulers", [])
            trained = [parameter for parameter in part.parameters() if parameter.requires_grad]  # type: ignore[union-attr]
            trained += [self.spare] if hasattr(self, "spare") and not made else []
            trained += [self.scale] if self.scale is not None and not made else []
            made.append(getattr(torch.optim, name)(trained, **wanted))
            schedules += [{"scheduler": schedule(made[-1], **wish), **wish["config"]} for wish in wishes]
        return made, schedules


def _changes_targets(hook: str) -> Any:
    def change(self: Drawn, *arguments: Any) -> None:
        for name, target in self.targets.items():
            way, _, moment = name.partition("-")
            if moment == hook:
                next(known for known in WAYS if known.__name__ == way)(target, self.network.head)

    return change


for _hook in CHANGING:
    setattr(Drawn, _hook, _changes_targets(_hook))


def lambda_callback() -> L.Callback:
    return LambdaCallback(
        on_train_epoch_end=lambda trainer, module: module.log("own/lambda", float(trainer.global_step))
    )


def weight_averaging() -> L.Callback:
    from lightning.pytorch.callbacks import WeightAveraging

    return WeightAveraging(avg_fn=swa_utils.get_swa_avg_fn())
