"""A start of train.py that gets the warning signal in mid-epoch: python -m hpc.studies.stopped_start [overrides]"""

import os
import signal
from typing import Any

import lightning as L

from hpc.run import command_line
from hpc.run.program import rank_process

EPOCH, NUM_BATCHES = 1, 3  # the second epoch, and so many of its batches, if there are more


class StopInMidEpoch(L.Callback):
    """Send this process the signal by which a job is told to stop, before the last batch of an epoch.

    In an epoch of unknown length, that is after its first batch.
    """

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        num_batches = trainer.num_training_batches
        last = 1 if num_batches == float("inf") else min(NUM_BATCHES, num_batches - 1)
        if trainer.current_epoch == EPOCH and batch_idx + 1 == last:
            os.kill(os.getpid(), signal.SIGUSR1)


def main() -> None:
    with rank_process() as process:
        cfg = command_line.compose(__doc__, process.arguments)
        from hpc.resume import trainer
        from train import train  # the project's own  # pyright: ignore[reportMissingImports]

        make_trainer = trainer.make_trainer

        def make_stopped_trainer(*arguments: Any, **options: Any) -> L.Trainer:
            made = make_trainer(*arguments, **options)
            # Not through the config, which the resumed run has, too.
            made.callbacks.append(StopInMidEpoch())  # type: ignore[attr-defined]
            return made

        trainer.make_trainer = make_stopped_trainer  # train.py looks it up when it is called
        train(cfg, process)


if __name__ == "__main__":
    main()
