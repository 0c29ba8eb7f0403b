"""What a run cannot go on with exactly after an interruption, rejected before its first step."""

from collections.abc import Callable

import lightning as L
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch.optim import LBFGS

from ..config import Refused


def check(trainer: L.Trainer) -> None:
    """When loaders and optimizers are there. Raises `Refused`."""
    for is_broken, key, value, rule, fix in RULES:
        if is_broken(trainer):
            raise Refused(key, value(trainer), f"{rule}, so that an interrupted run can go on exactly", fix)


Ask = Callable[[L.Trainer], object]
RULES: list[tuple[Ask, str, Ask, str, str]] = [
    (
        lambda trainer: isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher),
        "model",
        lambda trainer: f"{type(trainer.lightning_module).__name__}.training_step(dataloader_iter)",
        "training_step must be given its batches",
        "def training_step(self, batch, batch_idx)",
    ),
    (
        lambda trainer: trainer.reload_dataloaders_every_n_epochs > 1,  # type: ignore[attr-defined]
        "trainer.reload_dataloaders_every_n_epochs",
        lambda trainer: trainer.reload_dataloaders_every_n_epochs,  # type: ignore[attr-defined]
        "loaders must be made at each epoch or once",
        "trainer.reload_dataloaders_every_n_epochs=1, or 0",
    ),
    (
        lambda trainer: getattr(trainer, "_val_check_time_interval", None) is not None,
        "trainer.val_check_interval",
        lambda trainer: f"{trainer._val_check_time_interval:.0f} seconds",  # type: ignore[attr-defined]
        "validation must follow a number of batches, not the clock, which does not repeat itself",
        "trainer.val_check_interval=<batches, or a fraction of an epoch>",
    ),
    (
        lambda trainer: any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers),
        "model.optimizer",
        lambda trainer: "LBFGS",
        "an optimizer must keep its state by parameter",
        "another optimizer",
    ),
]
