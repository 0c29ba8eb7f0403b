"""The end of training, after the last checkpoint, when `on_train_end` may still change weights."""

from collections.abc import Callable

import lightning as L
import torch

from hpc.checkpoint import weights
from hpc.checkpoint.load_hooks import researcher_callbacks
from hpc.training import weight_averaging


def make_weight_change_reporter(trainer: L.Trainer, module: L.LightningModule) -> Callable[[], None]:
    """Return a function that prints a note if weights changed after this call, that is, after the last checkpoint."""
    before, callbacks = weights.local_sums(module), trainer.callbacks  # type: ignore[attr-defined]
    # The last checkpoint has the average, although an averaging callback puts it in place only later.
    is_averaging = any(isinstance(callback, weight_averaging.AVERAGING_CALLBACKS) for callback in callbacks)

    def report() -> None:
        if trainer.is_global_zero and not (is_averaging or torch.equal(before, weights.local_sums(module))):
            note = "on_train_end has changed the weights, so the test uses weights that are not in last.ckpt"
            print(f"note: {note}; it holds those before", flush=True)

    return report


def call_on_train_end(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Call the `on_train_end` of the researcher's code, which Lightning does not do if no step was left."""
    for callback in researcher_callbacks(trainer):
        if not isinstance(callback, weight_averaging.AVERAGING_CALLBACKS):  # the average is in place already
            callback.on_train_end(trainer, module)
    module.on_train_end()
