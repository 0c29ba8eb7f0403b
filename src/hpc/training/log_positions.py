"""The positions that the logs of a run have reached, and cutting them back to a checkpoint.

A resumed run logs the steps after its checkpoint again, so what an earlier attempt logged of them is removed. Files
that no attempt of this run has written are never touched.
"""

import csv
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

EVENT_FILE_PREFIX, CSV_FILE = "events.out.tfevents.", "metrics.csv"  # the files of TensorBoardLogger and CSVLogger
FILE_TIME_TOLERANCE_SECONDS = 2  # file names hold whole seconds


@runtime_checkable
class CutsItself(Protocol):
    """A logger that knows the positions of its own files."""

    def flush(self) -> None: ...

    def read_positions(self, run_dir: Path) -> dict[str, int]: ...

    def truncate(self, run_dir: Path, positions: Mapping[str, int]) -> None: ...


def read_positions(run_dir: Path, loggers: Sequence[Logger]) -> dict[str, int]:
    """Sync the log files to the disk and return how far each has come.

    Returns:
        By path relative to the run directory: bytes of TensorBoard's and wandb's files, rows of a CSVLogger's table
        and of MLflow's database.
    """
    positions = {}
    for logger in loggers:
        if isinstance(logger, CutsItself):
            positions |= logger.read_positions(run_dir)
        for file in _log_files(logger, _add_scalars_folders(logger)):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                size = os.fstat(stream.fileno()).st_size
                position = sum(1 for _ in stream) - 1 if file.name == CSV_FILE else size
                positions[os.path.relpath(file, run_dir)] = position
    return positions


def warn_of_late_clock(loggers: Sequence[Logger], now: float) -> None:
    """Warn if this node's clock is behind the one that named the newest event file.

    TensorBoard reads event files in the order of the times in their names, and drops steps that do not follow.

    Args:
        now: unix time.
    """
    files = [file for logger in loggers for file in _log_files(logger, set()) if file.name != CSV_FILE]
    times = [file.name.split(".")[3] for file in files]
    latest = max((int(time) for time in times if time.isdigit()), default=0)
    if latest > now:
        lag = f"this node's clock is at least {latest - now:.0f} s behind that of an earlier attempt"
        print(f"warning: {lag}: TensorBoard will not show what is logged from here on; report.py will", flush=True)


def truncate_logs(
    run_dir: Path, loggers: Sequence[Logger], *, positions: Mapping[str, int], events: Sequence[Mapping[str, Any]]
) -> None:
    """Remove what was logged after a checkpoint: the steps that follow it will be logged again.

    Only in the loggers' own folders, so the samples of the nodes stay, which no step repeats; and only in the run
    directory, as another user may have written its config. Event files that a researcher has written there, such as
    curves of a later evaluation, stay as they are.

    Args:
        positions: what `read_positions` returned at the checkpoint; of a run that starts anew, at its first start.
        events: the events of the run's attempts.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _keep_rows(logger, positions.get(os.path.relpath(Path(logger.log_dir, CSV_FILE), run_dir), 0))
        elif isinstance(logger, CutsItself):
            logger.truncate(run_dir, positions)
    for file, position in _event_files_of_attempts(run_dir, loggers, positions=positions, events=events):
        if position is None:
            file.unlink()
        elif file.stat().st_size > position:
            os.truncate(file, position)


def truncate_late_writes(run_dir: Path, loggers: Sequence[Logger], *, events: Sequence[Mapping[str, Any]]) -> None:
    """Remove what an earlier attempt, which hung and woke up again, has written since a later one started."""
    positions = [event.get("reached", {}) for event in events if event.get("event") == "start"]
    newest = positions[-1] if positions else {}
    for file, position in _event_files_of_attempts(run_dir, loggers, positions=newest, events=events):
        if position is not None and file.stat().st_size > position:
            os.truncate(file, position)


def _event_files_of_attempts(
    run_dir: Path, loggers: Sequence[Logger], *, positions: Mapping[str, int], events: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Path, int | None]]:
    """Yield TensorBoard's files that attempts of this run have written, each with its position, if it has one."""
    folders = {(run_dir / name).parent for name in positions}
    for logger in loggers:
        for file in _log_files(logger, folders) if not isinstance(logger, CSVLogger) else ():
            if file.resolve().is_relative_to(run_dir.resolve()) and _is_of_attempt(file.name, events):
                yield file, positions.get(os.path.relpath(file, run_dir))


def _is_of_attempt(name: str, events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an attempt has written this file: events.out.tfevents.TIME.HOST.PID.NUMBER.

    The time is compared, too, as other jobs have the same process ids.
    """
    time, _, rest = name.removeprefix(EVENT_FILE_PREFIX).partition(".")
    end_times = {str(event.get("attempt")): event.get("time") for event in events if event.get("event") == "end"}
    for event in events:
        start, end = event.get("time"), end_times.get(str(event.get("attempt")), math.inf)
        if not (time.isdecimal() and isinstance(start, int | float) and isinstance(end, int | float)):
            continue
        is_in_time = start - FILE_TIME_TOLERANCE_SECONDS <= int(time) <= end + FILE_TIME_TOLERANCE_SECONDS
        if rest.startswith(f"{event.get('writer')}.") and is_in_time:
            return True
    return False


def _log_files(logger: Logger, folders: set[Path]) -> list[Path]:
    """Return the files of a logger, in its folder and in those of `folders` that lie below it."""
    if not isinstance(logger, TensorBoardLogger | CSVLogger):
        return []
    log_dir = Path(logger.log_dir)
    if isinstance(logger, CSVLogger):
        return [file for file in [log_dir / CSV_FILE] if file.exists()]
    # Resolved: a path from a checkpoint may lead out of the folder again.
    own_folders = {folder for folder in (log_dir, *folders) if folder.resolve().is_relative_to(log_dir.resolve())}
    return sorted(file for folder in own_folders for file in folder.glob(f"{EVENT_FILE_PREFIX}*"))


def _add_scalars_folders(logger: Logger) -> set[Path]:
    """Return the folders that SummaryWriter.add_scalars has made."""
    if not isinstance(logger, TensorBoardLogger) or logger._experiment is None:  # `experiment` would create a file
        return set()
    return {Path(folder) for folder in logger.experiment.all_writers or ()}


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
