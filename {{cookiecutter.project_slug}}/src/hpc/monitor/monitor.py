"""Beside the training: a process on each node that samples what the node does, and notes of when the run did what."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L

from hpc.monitor import sampler
from hpc.resume.resume import Resume
from hpc.run import phases
from hpc.system import process
from hpc.training import lean

EPOCHS = 5  # of each start that are noted: a small run may make thousands


class Monitor(L.Callback):
    """Starts the sampler of its node (node.py) on each node's first rank. Rank 0 notes phases.

    Between the phases it does nothing: a step costs what it costs without.
    """

    def __init__(self, run_dir: str, every_seconds: float) -> None:
        self.run_dir, self.every_seconds = Path(run_dir), every_seconds
        self.attempt: int | None = None
        self._tell: int | None = None  # a pipe to the sampler
        self._begin: dict[str, float] = {}
        self._epochs = EPOCHS

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self.attempt is not None:
            return
        self.attempt = next((one.run.number for one in trainer.callbacks if isinstance(one, Resume)), 1)  # type: ignore[attr-defined]
        if not trainer.is_global_zero:
            lean.drop(self, "on_train_batch_end")
        else:
            with suppress(OSError):
                (self.run_dir / "monitor").mkdir(parents=True, exist_ok=True)
        if trainer.local_rank == 0:
            gpus = trainer.num_devices if trainer.strategy.root_device.type == "cuda" else 0
            self._tell = sampler.started(self.run_dir, self.attempt, self.every_seconds, gpus)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.fit_loop._should_accumulate():  # an epoch may end with fewer batches than a step has
            lean.drop(self, "on_train_batch_end")  # the first step is done: compiled, loaded
            self._begin["start"] = process.start_unix_time()
            self._note(trainer, "start")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin["epoch"] = time.time()  # of one that goes on in the middle, Lightning tells no start

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin["epoch"] = time.time()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._epochs:
            self._epochs -= 1
            self._note(trainer, "epoch")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin["validation"] = time.time()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:  # that is a part of the start
            self._note(trainer, "validation")

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin["test"] = time.time()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note(trainer, "test")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._leave()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "test":  # the last thing that a run does
            self._leave()

    def _note(self, trainer: L.Trainer, what: str) -> None:
        begin = self._begin.pop(what, None)
        if trainer.is_global_zero and self.attempt is not None and begin is not None:
            phases.note(self.run_dir, self.attempt, what, begin, trainer.global_step)

    def _leave(self) -> None:
        """Tell the sampler to end, which writes its last row first; nobody waits for it."""
        if self._tell is not None:
            with suppress(OSError):  # it has ended already
                os.write(self._tell, b"\n")  # closing alone would not do: a forked data worker may hold the pipe
            os.close(self._tell)
            self._tell = None
