"""A callback for fault injection: src/my_research/victim.py of a baked project."""

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from hpc.resume.resume import Resume
from my_research.strike import Strike, do


class Victim(L.Callback):
    """Record each step, make the result depend on each rank's random numbers, and be struck on request.

    It writes `steps` (attempt and step, on rank 0) and `pid-<rank>` into the run directory, and reads there
    `hold-<rank>`, on which that rank holds for ever, and `pace`, the seconds that a step takes more.
    """

    def __init__(self, run_dir: str) -> None:
        self.run_dir = Path(run_dir)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.run_dir / f"pid-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        batch[0].add_(torch.randn_like(batch[0]), alpha=0.1)

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        if trainer.global_rank == 0:  # not an attribute, which would go on with the run
            resume = next(callback for callback in trainer.callbacks if isinstance(callback, Resume))  # type: ignore
            with (self.run_dir / "steps").open("a") as stream:
                stream.write(f"{resume.run.number} {trainer.global_step}\n")
        hold = self.run_dir / f"hold-{trainer.global_rank}"
        if hold.exists():
            hold.unlink()
            do(Strike("on_train_batch_end", "hold"), self.run_dir)
        pace = self.run_dir / "pace"
        time.sleep(float(pace.read_text() or 0) if pace.exists() else 0)
