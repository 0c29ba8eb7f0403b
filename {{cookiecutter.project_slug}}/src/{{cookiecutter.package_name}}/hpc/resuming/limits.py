"""What a run cannot go on with exactly after an interruption, rejected before its first step."""

from collections.abc import Callable

import lightning as L
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch.optim import LBFGS

from ..checks.preflight import NOT_HERE
from ..config import Refused


def refuse_callbacks(trainer: L.Trainer) -> None:
    """Raises `Refused` for callbacks that a module brings, or that are derived, as preflight does for the config's."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in NOT_HERE and kind.__module__.startswith(("lightning.", "pytorch_lightning.")):
                fix = "leave it out of callbacks= and of the module's configure_callbacks"
                raise Refused("callbacks", type(callback).__name__, NOT_HERE[kind.__name__][0], fix)


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
