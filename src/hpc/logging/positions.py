"""The positions that the logs of a run have reached, and cutting them back to a checkpoint.

A resumed run logs the steps after its checkpoint again, so what an earlier attempt logged of them is removed: bytes of
TensorBoard's event files, rows of a CSVLogger's table. The name of an event file says which attempt has written it
(`new_writer`); files of others are never touched. Other loggers keep what they have.
"""

import csv
import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from hpc.logging.loggers import flush
from hpc.run import attempt_log

EVENT_FILE_PREFIX, CSV_FILE = "events.out.tfevents.", "metrics.csv"  # the files of TensorBoardLogger and CSVLogger


def new_writer(attempt: int) -> str:
    """Return the ending of an attempt's event files. It is random, as a copy of another run's file stays as it is."""
    return f"attempt-{attempt}-{secrets.token_hex(4)}"


def writers(events: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the endings of the event files of all attempts, from the events of a run."""
    return tuple(f".{event['writer']}" for event in events if event.get("event") == "start" and event.get("writer"))


def read_positions(run_dir: Path, loggers: Sequence[Logger], *, writers: tuple[str, ...]) -> dict[str, int]:
    """Sync the log files to the disk and return how far each has come.

    Returns:
        By path relative to the run directory: bytes of TensorBoard's files, rows of a CSVLogger's table.
    """
    positions = {}
    for file in (file for logger in loggers for file in [*_event_files(logger, writers), *_tables(logger)]):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            num_rows = sum(1 for _ in stream) - 1
            position = num_rows if file.name == CSV_FILE else os.fstat(stream.fileno()).st_size
        positions[os.path.relpath(file, run_dir)] = position
    return positions


def flush_logs(trainer: L.Trainer) -> dict[str, int]:
    """Write the logs to the disk, and return how far each file has come; see `read_positions`."""
    run_dir = Path(trainer.default_root_dir)
    flush(trainer.loggers)
    events = attempt_log.read_events(run_dir)
    truncate_late_writes(run_dir, trainer.loggers, events=events)
    return read_positions(run_dir, trainer.loggers, writers=writers(events))


def truncate_logs(
    run_dir: Path, loggers: Sequence[Logger], *, positions: Mapping[str, int], writers: tuple[str, ...]
) -> None:
    """Remove what was logged after a checkpoint: the steps that follow it will be logged again.

    Only in the run directory, as another user may have written its config.

    Args:
        positions: what `read_positions` returned at the checkpoint; of a run that starts anew, at its first start.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _keep_rows(logger, positions.get(os.path.relpath(Path(logger.log_dir, CSV_FILE), run_dir), 0))
        for file in _event_files(logger, writers, within=run_dir):
            position = positions.get(os.path.relpath(file, run_dir))
            if position is None:
                file.unlink()
            elif file.stat().st_size > position:
                os.truncate(file, position)


def truncate_late_writes(run_dir: Path, loggers: Sequence[Logger], *, events: Sequence[Mapping[str, Any]]) -> None:
    """Remove what an earlier attempt, which hung and woke up again, has written since a later one started.

    TensorBoard's writer holds two minutes of values in memory.
    """
    starts = [event for event in events if event.get("event") == "start"]
    reached = starts[-1].get("reached", {}) if starts else {}
    for file in (file for logger in loggers for file in _event_files(logger, writers(starts), within=run_dir)):
        position = reached.get(os.path.relpath(file, run_dir))
        if position is not None and file.stat().st_size > position:
            os.truncate(file, position)


def warn_of_late_clock(loggers: Sequence[Logger], now: float) -> None:
    """Warn if this node's clock is behind the one that named the newest event file.

    TensorBoard reads event files in the order of the times in their names, and drops steps that do not follow.

    Args:
        now: unix time.
    """
    boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
    files = [file for logger in boards for file in Path(logger.log_dir).glob(f"{EVENT_FILE_PREFIX}*")]
    times = [file.name.split(".")[3] for file in files]
    latest = max((int(time) for time in times if time.isdigit()), default=0)
    if latest > now:
        lag = f"this node's clock is at least {latest - now:.0f} s behind that of an earlier attempt"
        print(f"warning: {lag}: TensorBoard will not show what is logged from here on; report.py will", flush=True)


def _event_files(logger: Logger, writers: tuple[str, ...], *, within: Path | None = None) -> list[Path]:
    """Return the event files of some attempts, also those in the folders that SummaryWriter.add_scalars makes.

    Args:
        within: a folder. A logger that writes elsewhere has no files.
    """
    if not isinstance(logger, TensorBoardLogger):
        return []
    folder = Path(logger.log_dir)
    if within and not folder.resolve().is_relative_to(within.resolve()):
        return []
    return sorted(file for file in folder.rglob(f"{EVENT_FILE_PREFIX}*") if file.name.endswith(writers))


def _tables(logger: Logger) -> list[Path]:
    table = Path(logger.log_dir, CSV_FILE) if isinstance(logger, CSVLogger) else None
    return [table] if table and table.exists() else []


def _keep_rows(logger: CSVLogger, num_rows: int) -> None:
    """Let a CSVLogger append after its first rows. By itself it starts by removing its file, which is put back here."""
    file = Path(logger.log_dir, CSV_FILE)
    saved = file.with_name(f".{CSV_FILE}.part")
    if file.exists():  # else an earlier start was killed below, between removing and putting back
        saved.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[: num_rows + 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Previous log files in this directory will be deleted"
        writer: Any = logger.experiment
    if num_rows and saved.exists():
        with saved.open(newline="", encoding="utf-8") as stream:
            writer.metrics_keys = next(csv.reader(stream))
        saved.replace(file)
    saved.unlink(missing_ok=True)
