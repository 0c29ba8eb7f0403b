"""MLflow without a server: a database in the run directory, one run over all attempts, and each row once."""

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict  # private: as Lightning names parameters
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

# The latest value of each metric, which MLflow keeps in a table of its own.
LATEST = """
    INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid)
    SELECT key, value, timestamp, step, is_nan, run_uuid FROM (
        SELECT *, row_number() OVER (PARTITION BY key ORDER BY step DESC, timestamp DESC, value DESC) AS place
        FROM metrics WHERE run_uuid = ?
    ) WHERE place = 1
"""


class LocalMLFlowLogger(MLFlowLogger):
    """An MLFlowLogger whose database, mlflow.db, lies in a folder of the run and can be cut back to a checkpoint.

    Args:
        save_dir: the folder; in the run directory.
        tags: of the run.
    """

    def __init__(
        self,
        save_dir: str,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tags: dict[str, Any] | None = None,
    ) -> None:
        Logger.__init__(self)
        self._folder = Path(save_dir).absolute()
        self._options = {"experiment_name": experiment_name, "run_name": run_name, "tags": tags}
        self._is_open = False

    @property
    def database(self) -> Path:
        """The file of the database."""
        return self._folder / "mlflow.db"

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """MLflow's client. The first use opens the database, on rank 0 only: ranks would make its tables at once."""
        if not self._is_open:
            self._open()
        return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        _ = self.experiment
        super().log_metrics(metrics, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Log hyperparameters that the run does not have yet: MLflow keeps the first value of each."""
        logged = self.experiment.get_run(self.run_id).data.params
        flat = _flatten_dict(_convert_params(params))
        super().log_hyperparams({key: value for key, value in flat.items() if key not in logged})

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        if self._is_open:
            super().finalize(status)

    def flush(self) -> None:
        """Do nothing: each row is on the disk once it is logged."""

    def read_positions(self, run_dir: Path) -> dict[str, int]:
        """Return the number of rows that the run has, by the path of the database relative to the run directory."""
        if (run_id := self._read_run_id()) is None:
            return {}
        with self._connect() as database:
            (num_rows,) = database.execute("SELECT count(*) FROM metrics WHERE run_uuid = ?", [run_id]).fetchone()
        return {os.path.relpath(self.database, run_dir): num_rows}

    def truncate(self, run_dir: Path, positions: Mapping[str, int]) -> None:
        """Remove the rows that were logged after a position, before the database is opened."""
        if (run_id := self._read_run_id()) is None:
            return
        num_rows = positions.get(os.path.relpath(self.database, run_dir), 0)
        later = "SELECT rowid FROM metrics WHERE run_uuid = ? ORDER BY rowid LIMIT -1 OFFSET ?"
        with self._connect() as database:
            database.execute(f"DELETE FROM metrics WHERE rowid IN ({later})", [run_id, num_rows])
            database.execute("DELETE FROM latest_metrics WHERE run_uuid = ?", [run_id])
            database.execute(LATEST, [run_id])

    def _open(self) -> None:
        """Open the database, and continue its run, or make both."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would use the network
        import mlflow  # noqa: F401 - sets up the logging whose level is changed

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        if (run_id := self._read_run_id()) is None:
            self.database.unlink(missing_ok=True)  # perhaps an attempt was killed while it made the tables
        self._folder.mkdir(parents=True, exist_ok=True)
        uri, artifacts = f"sqlite:///{self.database}", f"{self._folder}/mlflow-artifacts"
        super().__init__(tracking_uri=uri, artifact_location=artifacts, run_id=run_id, **self._options)
        self._is_open = True
        if run_id:
            self.experiment.update_run(run_id, status="RUNNING")

    def _read_run_id(self) -> str | None:
        """Return the id of the run in the database; None if there is none yet."""
        if not self.database.exists():
            return None
        with self._connect() as database:
            if not database.execute("SELECT name FROM sqlite_master WHERE name = 'runs'").fetchone():
                return None
            row = database.execute("SELECT run_uuid FROM runs ORDER BY start_time LIMIT 1").fetchone()
        return row[0] if row else None

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """Connect to the database, and commit at the end."""
        with closing(sqlite3.connect(self.database)) as database, database:
            yield database
