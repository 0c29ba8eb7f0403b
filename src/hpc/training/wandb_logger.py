"""Weights & Biases without a network: one run over all attempts, and each row once.

Each attempt, and each restart of wandb's service, writes a folder of its own, `wandb/offline-run-TIME-ID`. All have the
same id, and `wandb sync` uploads them in the order of their times, as one run (wandb 0.31).
"""

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from hpc.training.wandb_file import FilePosition, read_end

FLUSH_SECONDS = 0.1  # wandb writes to the disk so often; its default of 15 s would hold up each checkpoint
MAX_FLUSH_SECONDS = 60.0  # after which a disk that is too slow is reported
POLL_SECONDS = 0.01


class OfflineWandbLogger(WandbLogger):
    """A WandbLogger that works offline, survives the end of wandb's service, and can be cut back to a checkpoint.

    Schedulers send SIGTERM to all processes of a job, and wandb's service ends with it, before the run has saved and
    stopped. Rows are therefore kept until they are on the disk, and the service is started again.

    Args:
        save_dir: where the folder `wandb` is made; in the run directory.
        id: of the run at Weights & Biases; null: a random one, which `wandb/id` keeps for later attempts.
        settings: of `wandb.Settings`.
        options: other arguments of `wandb.init`.
    """

    def __init__(
        self,
        save_dir: str,
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._folder = Path(save_dir, "wandb")
        self._id_file = self._folder / "id"
        id = id or (self._id_file.read_text().strip() if self._id_file.exists() else secrets.token_hex(4))
        super().__init__(name=name, save_dir=save_dir, id=id, project=project, offline=True)
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its error reports would use the network
        settings = {"x_transaction_log_flush_interval": FLUSH_SECONDS, **(settings or {})}
        self._init_options = {"dir": save_dir, "id": id, "project": self.name, "name": name, "resume": "allow"}
        self._init_options |= {"mode": "offline", "settings": settings, **options}
        self._run: Any = None
        self._unconfirmed: list[tuple[int, dict[str, Any]]] = []  # rows that may not be on the disk: (`_step`, values)
        self._position = FilePosition()  # of the present file

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of wandb. Where its service has ended, it is started again."""
        if self._next_row() is None:
            self._start()
        return self._run

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        row = {**metrics, **({} if step is None else {"trainer/global_step": step})}
        run = self.experiment
        self._unconfirmed.append((run.step, row))
        try:
            run.log(row)
        except Exception:
            if self._next_row() is not None:  # wandb rejects the row itself
                self._unconfirmed.pop()
                raise
            self._start()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        self.flush()

    def flush(self) -> None:
        """Wait until all rows are on the disk."""
        deadline = time.monotonic() + MAX_FLUSH_SECONDS
        while self._run is not None:
            num_rows = self.experiment.step
            self._position = read_end(self._file(), after=self._position)
            if self._position.next_row >= num_rows:
                self._unconfirmed.clear()
                return
            if time.monotonic() > deadline:
                unwritten = num_rows - self._position.next_row
                print(f"warning: wandb has not written its last {unwritten} rows within a minute", flush=True)
                return
            time.sleep(POLL_SECONDS)

    def read_positions(self, run_dir: Path) -> dict[str, int]:
        """Sync the files to the disk, and return the bytes of each by its path relative to the run directory."""
        positions = {}
        for file in self._files():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                is_present = self._run is not None and file.samefile(self._file())
                size = self._position.num_bytes if is_present else os.fstat(stream.fileno()).st_size
                positions[os.path.relpath(file, run_dir)] = size
        return positions

    def truncate(self, run_dir: Path, positions: Mapping[str, int]) -> None:
        """Cut the files of earlier attempts back to their positions. Remove the folders of those that have none."""
        for file in self._files():
            position = positions.get(os.path.relpath(file, run_dir))
            is_cut = position is None or file.stat().st_size > position
            if is_cut and file.with_name(f"{file.name}.synced").exists():
                note = "has been uploaded with steps that the run now logs again: W&B will show these twice"
                print(f"note: {file.parent.name} {note}", flush=True)
            if position is None:
                shutil.rmtree(file.parent)
            elif is_cut:
                os.truncate(file, position)

    def _start(self) -> None:
        """Start wandb's service and a new folder. If an earlier service has ended, log what it had not written."""
        import wandb  # pyright: ignore[reportMissingImports]

        rows, self._unconfirmed = self._unconfirmed, []
        if self._run is not None:
            end = read_end(self._file(), after=self._position)
            os.truncate(self._file(), end.num_bytes)
            rows = [row for row in rows if row[0] >= end.next_row]
            with suppress(Exception):  # it reports that the service has ended
                wandb.teardown()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._id_file.write_text(f"{self.version}\n")
        # Not Lightning's own start, which would take the run of the service that has ended.
        self._run = self._experiment = wandb.init(**self._init_options)
        self._position = FilePosition()
        self._run.define_metric("trainer/global_step")
        self._run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        for _, row in rows:
            self._unconfirmed.append((self._run.step, row))
            self._run.log(row)

    def _next_row(self) -> int | None:
        """Return the `_step` of the next row; None if wandb's service does not run."""
        try:
            return None if self._run is None else self._run.step
        except Exception:  # of several classes, which wandb does not document
            return None

    def _file(self) -> Path:
        """Return the file that is being written."""
        return Path(self._run.sync_dir, f"run-{self._run.id}.wandb")

    def _files(self) -> list[Path]:
        """Return the files of all attempts, in the order of their times."""
        return sorted(self._folder.absolute().glob(f"offline-run-*/run-{self.version}.wandb"))
