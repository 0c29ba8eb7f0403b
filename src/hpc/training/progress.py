"""What a run prints: a bar on a terminal, lines in a pipe or a job's log, which keeps every carriage return."""

import logging
import sys
import time
import warnings
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar

# Warnings that a user can do nothing about. The second advises srun for a run outside of a job.
LIBRARIES_WARNINGS = [
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "The `srun` command is available",
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to save",
]


def progress_bar(refresh_rate: int = 10) -> ProgressBar:
    """Return Lightning's bar on a terminal or in a notebook, else `ProgressLines`.

    Args:
        refresh_rate: steps between two updates of the bar.
    """
    has_bar = sys.stdout.isatty() or "ipykernel" in sys.modules
    return TQDMProgressBar(refresh_rate) if has_bar else ProgressLines()


def silence_libraries() -> None:
    """Leave out warnings that nobody can act on, and advertisements."""
    for message in LIBRARIES_WARNINGS:
        warnings.filterwarnings("ignore", message)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(is_no_advertisement)


def is_no_advertisement(record: logging.LogRecord) -> bool:
    """Return whether a line of Lightning's log is not about products that it recommends."""
    return not record.getMessage().startswith("💡 Tip:")


class ProgressLines(ProgressBar):
    """Prints a line at the end of each epoch, and of whatever takes longer one each minute."""

    def __init__(self, every_seconds: float = 60.0) -> None:
        super().__init__()
        self.every_seconds, self._is_shown, self._last_time = every_seconds, True, time.monotonic()

    def disable(self) -> None:  # on all ranks but the first
        self._is_shown = False

    def enable(self) -> None:
        self._is_shown = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() - self._last_time >= self.every_seconds:
            self._print_training(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._print_training(trainer, pl_module)

    # A number after the batch and its index is that of the loader.
    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *batch: Any, **number: Any
    ) -> None:
        self._print_batches("validation", batch[1])

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *batch: Any, **number: Any
    ) -> None:
        self._print_batches("test", batch[1])

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *batch: Any, **number: Any
    ) -> None:
        self._print_batches("prediction", batch[1])

    def _print_training(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        metrics = {name: value for name, value in self.get_metrics(trainer, module).items() if name != "v_num"}
        values = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in metrics.items()
        ]
        self._print(", ".join([f"train: epoch {trainer.current_epoch}, step {trainer.global_step}", *values]))

    def _print_batches(self, name: str, batch_idx: int) -> None:
        if time.monotonic() - self._last_time >= self.every_seconds:
            self._print(f"{name}: {batch_idx + 1} batches")

    def _print(self, line: str) -> None:
        self._last_time = time.monotonic()
        if self._is_shown:
            print(line, flush=True)
