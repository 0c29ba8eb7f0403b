"""Beside the training: a process on each node that samples what the node does, and notes of when the run did what."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L

from . import lean, phases, process
from .config import PACKAGE, PROJECT
from .resume import Resume

EPOCHS = 5  # of each start that are noted: a small run may make thousands
# A scheduler sends its warnings to every process: the ranks go on till they have saved, and so does what watches them.
BLOCKED = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]


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
        self.attempt = next((one.attempt for one in trainer.callbacks if isinstance(one, Resume)), 1)  # type: ignore[attr-defined]
        if not trainer.is_global_zero:
            lean.drop(self, "on_train_batch_end")
        else:
            with suppress(OSError):
                (self.run_dir / "monitor").mkdir(parents=True, exist_ok=True)
        if trainer.local_rank == 0:
            gpus = trainer.num_devices if trainer.strategy.root_device.type == "cuda" else 0
            self._tell = started(self.run_dir, self.attempt, self.every_seconds, gpus)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            lean.drop(self, "on_train_batch_end")  # the first step is done: compiled, loaded
            self._begin["start"] = process.began()
            self._note(trainer, "start")

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
        if trainer.is_global_zero and self.attempt is not None:
            phases.note(self.run_dir, self.attempt, what, self._begin[what], trainer.global_step)

    def _leave(self) -> None:
        """Tell the sampler to end, which writes its last row first; nobody waits for it."""
        if self._tell is not None:
            with suppress(OSError):  # it has ended already
                os.write(self._tell, b"\n")  # closing alone would not do: a forked data worker may hold the pipe
            os.close(self._tell)
            self._tell = None


def started(run_dir: Path, attempt: int, seconds: float, gpus: int) -> int | None:
    """A sampler of this node runs; the end of a pipe that tells it to end. None: it could not be started."""
    reads, writes = os.pipe()
    words = [str(run_dir), str(attempt), str(seconds), str(gpus), str(os.getpid())]
    path = os.pathsep.join(filter(None, [str(PROJECT / "src"), os.environ.get("PYTHONPATH")]))
    try:
        os.posix_spawn(  # unlike a fork it copies nothing of a process that may hold a large model
            sys.executable,
            [sys.executable, "-P", "-m", f"{PACKAGE}.hpc.node", *words],
            os.environ | {"PYTHONPATH": path},
            file_actions=[(os.POSIX_SPAWN_DUP2, reads, 0)],
            setsigmask=BLOCKED,
        )
    except OSError as error:
        print(f"warning: this node is not watched: {error.strerror}", flush=True)
        os.close(writes)
        return None
    finally:
        os.close(reads)
    return writes
