"""A callback that records and fails: src/my_research/witness.py of a baked project."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import lightning as L

from my_research.strike import Strike, do

NAMES = ("SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "OMP_NUM_THREADS", "HPC_POISON")
DEEDS = {"kill": "SIGKILL"}


class Witness(L.Callback):
    """Write down where each rank is and what it sees. If asked to, do a deed of `strike` after the second batch."""

    def __init__(self, run_dir: str, fault: str | None, rank: int) -> None:
        self.run_dir, self.fault, self.rank = Path(run_dir), fault, rank

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seen = {name: os.environ.get(name) for name in NAMES}
        seen |= {"host": socket.gethostname(), "local_rank": trainer.local_rank, "world_size": trainer.world_size}
        seen |= {"pid": os.getpid(), "strategy": type(trainer.strategy).__name__, "cwd": os.getcwd()}
        (self.run_dir / f"rank-{trainer.global_rank}.json").write_text(json.dumps(seen))

    def on_train_batch_end(self, trainer: L.Trainer, *others: Any) -> None:
        if self.fault is None or trainer.global_rank != self.rank or trainer.fit_loop.epoch_loop.total_batch_idx < 1:
            return
        do(Strike("on_train_batch_end", DEEDS.get(self.fault, self.fault)), self.run_dir, trainer)

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *others: Any
    ) -> None:
        with (self.run_dir / f"predicted-{trainer.global_rank}").open("a") as file:
            print(len(outputs), file=file)
        while self.fault == "hold" and batch_idx == 1 and not (self.run_dir / "go").exists():
            time.sleep(0.05)
