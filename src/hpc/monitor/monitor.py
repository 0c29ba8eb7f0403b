"""A callback that starts a sampler on each node and notes the phases of a run, such as start, validation and test."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L

from hpc.monitor.pauses import PauseClock
from hpc.monitor.sampler import NodeSampler
from hpc.privates import lightning as privates
from hpc.resume.resume import Resume
from hpc.run import attempt_log
from hpc.system import process
from hpc.training import step_overhead

MAX_RECORDED_EPOCHS = 5  # that each attempt notes: a small run may have thousands of them


class Monitor(L.Callback):
    """Start the sampler (sampler.py), a thread, on the first rank of each node, and note phases on rank 0.

    It does nothing between phases, so that a step takes no longer.
    """

    def __init__(self, run_dir: str, every_seconds: float) -> None:
        self.run_dir, self.every_seconds = Path(run_dir), every_seconds
        self.attempt: int | None = None
        self._sampler: NodeSampler | None = None
        self._begins: dict[str, float] = {}  # unix time by phase
        self._pauses: PauseClock | None = None
        self._epochs_left = MAX_RECORDED_EPOCHS

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.attempt is not None:
            return
        resumes = [callback for callback in trainer.callbacks if isinstance(callback, Resume)]  # type: ignore[attr-defined]
        self.attempt = resumes[0].run.number if resumes else 1
        if not trainer.is_global_zero:
            step_overhead.disable_hook(self, "on_train_batch_end")
        else:
            self._pauses = PauseClock(trainer) if stage == "fit" else None
            with suppress(OSError):
                (self.run_dir / "monitor").mkdir(parents=True, exist_ok=True)
        if trainer.local_rank == 0:
            gpus = trainer.num_devices if trainer.strategy.root_device.type == "cuda" else 0
            self._sampler = NodeSampler(self.run_dir, self.attempt, every_seconds=self.every_seconds, num_gpus=gpus)
            self._sampler.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not privates.is_accumulating(trainer):  # an epoch may end with fewer batches than a step has
            step_overhead.disable_hook(
                self, "on_train_batch_end"
            )  # the first step is done, with all compiling and loading
            self._begins["start"] = process.start_unix_time()
            self._note(trainer, "start")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begins["epoch"] = time.time()  # an epoch that resumes in its middle has no on_train_epoch_start

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begins["epoch"] = time.time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._epochs_left:
            self._epochs_left -= 1
            self._note(trainer, "epoch")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The validation's workers have started before this.
        self._begins["validation"] = self._pauses.begin_time if self._pauses else time.time()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:  # the sanity check is a part of the start
            self._note(trainer, "validation")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begins["test"] = time.time()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note(trainer, "test")

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begins["start"] = process.start_unix_time()
        self._note(trainer, "start")
        self._begins["predict"] = time.time()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._note(trainer, "predict")
        self._stop_sampler()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._note(trainer, "predict")
        if stage != "fit":  # a test follows a fit; nothing follows a test or a prediction
            self._stop_sampler()

    def _note(self, trainer: L.Trainer, name: str) -> None:
        begin = self._begins.pop(name, None)
        if begin is not None and self.attempt is not None and trainer.is_global_zero:
            attempt_log.record_phase(self.run_dir, self.attempt, name=name, begin_time=begin, step=trainer.global_step)

    def _stop_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
