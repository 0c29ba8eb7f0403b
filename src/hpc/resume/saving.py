"""Save a run between two steps: when a save is due, what the manifest says, and waiting for the write."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from hpc.checkpoint import on_disk, plain_data
from hpc.checkpoint.strategy_state import MANIFEST_KEY, ON_PUBLISHED, VALIDATED_WEIGHTS
from hpc.checkpoint.writer import CheckpointNotWritten
from hpc.config.sections import CheckpointConfig
from hpc.logging.positions import flush_logs
from hpc.privates import lightning as privates
from hpc.resume.best_checkpoint import BestCheckpoint
from hpc.run import attempt_log, causes
from hpc.training import weight_averaging
from hpc.training.attempt import Attempt

WRITE_HANG_FACTOR = (
    4  # a write may show no sign of progress for so many times hang_minutes: some disks are slow to sync
)
ASSUMED_SAVE_SECONDS = 60.0  # until a save was measured


class Saver:
    """Saves checkpoints and waits for them.

    Args:
        hang_seconds: `faults.hang_minutes`, in seconds.

    Attributes:
        best: the best checkpoint so far.
        saved_step: step of the last checkpoint; 0: the beginning, which is not saved.
        save_seconds: that a save takes.
        has_new_metrics: whether a validation has been done since ranks last agreed, by which a checkpoint may be best.
        validated_average: the averaged weights that were validated, if the average has changed since.
        is_averaged: whether the module's weights are the average that was put in place at the end.
    """

    def __init__(self, run: Attempt, settings: CheckpointConfig, *, hang_seconds: float) -> None:
        self.run, self.settings, self.hang_seconds = run, settings, hang_seconds
        self.best = BestCheckpoint(settings)
        self.saved_step = 0
        self.save_seconds = ASSUMED_SAVE_SECONDS
        self.has_new_metrics = False
        self.validated_average: dict[str, Tensor] | None = None
        self.is_averaged = False
        self._num_of_step = 0  # checkpoints of `saved_step` before the last one
        self._saved_time = time.monotonic()
        self._saved_updates = 0  # of averages, when they were last saved
        self._is_saving = False  # else a researcher's own code calls `Trainer.save_checkpoint`

    def begin_training(self, trainer: L.Trainer) -> None:
        self._saved_updates = weight_averaging.num_updates(trainer)

    def is_step_due(self, step: int) -> bool:
        """Return whether `checkpoint.every_n_steps` has passed; several optimizers make several steps at once."""
        interval = self.settings.every_n_steps
        return bool(interval) and step // interval > self.saved_step // interval

    def is_time_due(self, trainer: L.Trainer) -> bool:
        """Return whether `checkpoint.every_minutes` have passed, and no checkpoint is being written."""
        minutes = self.settings.every_minutes
        is_over = minutes is not None and time.monotonic() - self._saved_time > 60 * minutes
        return is_over and not trainer.strategy.is_writing  # type: ignore[attr-defined]

    def is_new_best(self) -> bool:
        """Return whether the last validation was better than that of the best checkpoint."""
        return self.has_new_metrics and self.best.is_beaten_by(self.run.validation_metrics)

    def start_save(self, trainer: L.Trainer, step: int, *, is_best: bool, is_averaged: bool = False) -> None:
        """Copy the state and start to write it. A failure is reported, here or by `wait_or_warn`."""
        begin_time = time.time()
        self.wait_or_warn(trainer)
        self._num_of_step = self._num_of_step + 1 if step == self.saved_step else 0
        num_before = 0 if is_averaged else self._num_of_step
        attempt = self.run.number
        final = on_disk.checkpoint_path(self.run.run_dir, step, attempt, num_before=num_before, averaged=is_averaged)
        if is_best:
            self.best.replace(self.run.validation_metrics, folder=final.name)
        else:
            self.validated_average = None
        self._is_saving = True
        try:
            trainer.save_checkpoint(final, weights_only=False)
        except CheckpointNotWritten as error:
            self._warn(trainer, step, error)
        except Exception as error:
            if causes.is_deterministic(error):  # else the next attempt may save it
                plain_data.raise_config_error_for_callback(error, trainer.callbacks)  # type: ignore[attr-defined]
            raise
        finally:
            self._is_saving = False
        self.saved_step, self._saved_time = step, time.monotonic()
        # The present average is not saved if the checkpoint holds an earlier one, which was validated.
        self._saved_updates = weight_averaging.num_updates(trainer) if self.validated_average is None else -1
        self.validated_average = None
        if trainer.is_global_zero:
            attempt_log.record_phase(
                self.run.run_dir, self.run.number, name="checkpoint", begin_time=begin_time, step=step
            )

    def add_to_checkpoint(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        """Add to a checkpoint what its manifest says and what happens once it is published."""
        checkpoint["attempt"] = self.run.number
        checkpoint["averaged"] = self.is_averaged
        checkpoint[MANIFEST_KEY] = {
            "step": trainer.global_step,  # counts the steps of all optimizers
            "attempt": self.run.number,
            "epoch": trainer.current_epoch,
            "stepped": privates.logged_step(trainer),  # the number that curves show
            "batches": trainer.fit_loop.epoch_loop.batch_progress.total.completed,
            "averaged": self.is_averaged,
            # For good, by a callback. At the end of an epoch a callback may say so only because `max_steps` ended it.
            "stopped_early": trainer.should_stop and trainer.fit_loop._can_stop_early,
        }
        if self._is_saving:
            checkpoint[ON_PUBLISHED] = partial(self._tidy, best_folder=self.best.folder)
        else:  # the folder is the researcher's: nothing in it is linked or removed
            self.wait_or_warn(trainer)
        if self.validated_average is not None:
            checkpoint[VALIDATED_WEIGHTS] = self.validated_average
        if trainer.is_global_zero:
            checkpoint[MANIFEST_KEY]["logs"] = flush_logs(trainer)

    def save_average(self, trainer: L.Trainer, module: L.LightningModule, *, has_trained: bool) -> None:
        """Put the averaged weights in place at the end, and save them: what is tested must be in a checkpoint.

        Args:
            has_trained: this attempt has trained; else no step was left.
        """
        has_changed = has_trained and self._saved_updates != weight_averaging.num_updates(trainer)
        self.is_averaged = (
            weight_averaging.apply_average(trainer, module, will_call_on_train_end=has_trained) or has_changed
        )
        if self.is_averaged:
            self.start_save(trainer, trainer.global_step, is_best=self.is_new_best(), is_averaged=True)

    def wait_or_warn(self, trainer: L.Trainer) -> None:
        """Wait for the checkpoint that is being written. A failure is reported; earlier checkpoints are untouched."""
        writer: Any = trainer.strategy.writer  # type: ignore[attr-defined]
        try:
            self.wait_or_raise(trainer)
            self.save_seconds = writer.seconds or self.save_seconds
            self.run.watch.has_saved |= bool(writer.seconds)
            self.best.confirm()
        except CheckpointNotWritten as error:
            self._warn(trainer, self.saved_step, error)

    def wait_or_raise(self, trainer: L.Trainer) -> None:
        """Wait until nothing is being written, for as long as the write makes progress.

        Raises:
            CheckpointNotWritten: the write has failed.
        """
        step, last_progress_time = trainer.global_step, time.monotonic()

        def report(is_writing: bool) -> None:
            nonlocal last_progress_time
            now = time.monotonic()
            last_progress_time = now if is_writing else last_progress_time
            if now - last_progress_time < (WRITE_HANG_FACTOR - 1) * self.hang_seconds:
                self.run.watch.report_progress(step, "waiting for a checkpoint to be written")

        trainer.strategy.writer.wait(report)  # type: ignore[attr-defined]

    def _warn(self, trainer: L.Trainer, step: int, error: CheckpointNotWritten) -> None:
        self.best.revert()
        if trainer.is_global_zero:
            print(f"warning: the checkpoint of step {step} was not written: {error}", flush=True)

    def _tidy(self, final: Path, best_folder: str | None) -> None:
        """Link a whole checkpoint and remove those that it supersedes, on the thread that has written it."""
        on_disk.set_link(final.with_name(on_disk.LAST), final)
        if final.name == best_folder:
            on_disk.set_link(final.with_name(on_disk.BEST), final)
        on_disk.prune(final, self.settings.keep)


def validation_metric_names(trainer: Any) -> set[str]:
    """Return the names of the metrics of a validation, also in a sanity check, where Lightning does not show them."""
    results = privates.results(trainer)
    epoch_results = [result for result in results.values() if result.meta.on_epoch]
    return {name for result in epoch_results for name in results._forked_name(result, on_step=False)}
