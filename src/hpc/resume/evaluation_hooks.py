"""Lightning's hooks of validation, test and prediction, in which a run can stop; only a prediction saves something."""

from collections.abc import Callable
from typing import Any

import lightning as L

from hpc.data.loader_agreement import reject_differing_orders
from hpc.predict.prediction_writer import PredictionWriter
from hpc.resume.step_boundary import StepBoundary
from hpc.run.signals import SignalState
from hpc.run.watchdog import Watchdog
from hpc.training.attempt import Attempt


class StopsEvaluations(L.Callback):
    """The part of the callback Resume that belongs to evaluations."""

    run: Attempt
    boundary: StepBoundary
    signals: SignalState
    watch: Watchdog

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.boundary.begin_evaluation()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.signals.install_handlers()
        self.boundary.begin_evaluation()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_test_start(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._start_batch(trainer, batch_idx, dataloader_idx)

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._start_batch(trainer, batch_idx, dataloader_idx)

    def on_predict_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        before_stop = [callback.write_before_stop for callback in callbacks if isinstance(callback, PredictionWriter)]
        self._start_batch(trainer, batch_idx, dataloader_idx, *before_stop)

    def _start_batch(
        self, trainer: Any, batch_idx: int, dataloader_idx: int, *before_stop: Callable[[], dict[str, float]]
    ) -> None:
        trainer.strategy.end_computing_along()
        if batch_idx == 0:
            split = trainer.state.stage.dataloader_prefix
            loaders = getattr(trainer, f"{split}_dataloaders")
            reject_differing_orders(loaders, self.boundary.agreement.group, split=split)
        self.boundary.stop_evaluation_if_due(*before_stop)
        trainer.strategy.begin_evaluation_batch(batch_idx, dataloader_idx)

    def on_validation_batch_end(self, trainer: L.Trainer, *batch: Any, **number: Any) -> None:
        self.watch.report_progress(trainer.global_step, "validating")

    def on_test_batch_end(self, trainer: L.Trainer, *batch: Any, **number: Any) -> None:
        self.run.has_started_training = True
        self.watch.report_progress(trainer.global_step, "testing")

    def on_predict_batch_end(self, trainer: L.Trainer, *batch: Any, **number: Any) -> None:
        self.run.has_started_training = True
        self.watch.report_progress(trainer.global_step, "predicting")
