"""The loggers of a run. One that goes on writes on where its checkpoint was; nobody else's file is touched."""

import csv
import math
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from omegaconf import DictConfig, ListConfig

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config.build import build
from hpc.config.errors import ConfigError

EVENTS, ROWS = "events.out.tfevents.", "metrics.csv"  # the files of TensorBoardLogger and of CSVLogger
SKEW = 2  # seconds: names hold whole ones


def build_all(cfg: DictConfig, found: Checkpoint | None, starts: Sequence[Mapping[str, Any]]) -> list[Logger]:
    """The loggers of the config: one, a list, or named ones, of which those that are null are left out.

    Args:
        starts: the start events of the run's earlier attempts.

    Raises:
        ConfigError: `logger` is something else, or a table lies outside the run directory.
    """
    nodes = cfg.logger
    if isinstance(nodes, ListConfig):
        nodes = list(nodes)
    elif isinstance(nodes, DictConfig) and "_target_" not in nodes:
        nodes = list(nodes.values())
    else:
        nodes = [nodes]
    nodes = [node for node in nodes if node]
    if wrong := [node for node in nodes if not isinstance(node, DictConfig) or "_target_" not in node]:
        rule = "each logger must be a node with a _target_; logger must be one, a list of them, or named ones"
        raise ConfigError("logger", wrong[0], rule, "see `logger` in configs/train.yaml")
    before = [Path(cfg.run_dir, folder) for start in starts for folder in start.get("log_dirs", [])]
    loggers = [_build(node, found, before) for node in nodes]
    home = Path(cfg.run_dir).resolve()
    for logger in loggers:
        if isinstance(logger, CSVLogger) and not Path(logger.log_dir).resolve().is_relative_to(home):
            rule = "must lie in the run directory: a run that goes on cuts it, and others may write there"
            raise ConfigError("logger.save_dir", logger.root_dir, rule, "save_dir: ${run_dir} in the logger's node")
    return loggers


def _build(node: DictConfig, found: Checkpoint | None, before: Sequence[Path]) -> Any:
    from hydra.utils import get_object

    kind, more = get_object(node._target_), {}
    if isinstance(kind, type) and issubclass(kind, TensorBoardLogger):
        # Also at the beginning: TensorBoard takes the first such mark for one, and drops older points only at the next.
        more["purge_step"] = found.details.get("stepped", found.step) + 1 if found else 0
    logger = build(node, **more)
    if isinstance(logger, TensorBoardLogger | CSVLogger) and node.get("version") is None:
        own = [folder for folder in before if folder.parent == Path(logger.root_dir)]
        if own:  # not the next free version at each start
            logger = build(node, **more, version=own[-1].name)
    return logger


def folders(run_dir: Path, loggers: Sequence[Logger]) -> list[str]:
    """Where they write, as seen from the run directory."""
    return [os.path.relpath(logger.log_dir, run_dir) for logger in loggers if logger.log_dir]


def fence(loggers: Sequence[Logger], may_write: Callable[[], bool]) -> None:
    """Let tables be written only by who may: attempts share one file, into which one that woke up too late would write.

    TensorBoard's files are each attempt's own; `cut_again` takes away what was written there too late.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            logger.save = partial(_save_if, may_write, logger.save)  # type: ignore[method-assign]


def _save_if(may_write: Callable[[], bool], save: Callable[[], None]) -> None:
    if may_write():
        save()


def flush(loggers: Sequence[Logger]) -> None:
    """Write out what they still hold."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
        elif isinstance(logger, CSVLogger):
            logger.save()


def positions(run_dir: Path, loggers: Sequence[Logger]) -> dict[str, int]:
    """How far their files have come: bytes of TensorBoard's, rows of a CSVLogger's. They are on the disk then."""
    found = {}
    for logger in loggers:
        for file in _files(logger, _of_add_scalars(logger)):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                size = os.fstat(stream.fileno()).st_size
                found[os.path.relpath(file, run_dir)] = sum(1 for _ in stream) - 1 if file.name == ROWS else size
    return found


def warn_of_clock(loggers: Sequence[Logger], now: float) -> None:
    """TensorBoard reads event files in the order of the times in their names, and drops what does not follow."""
    names = [file.name.split(".")[3] for logger in loggers for file in _files(logger, set()) if file.name != ROWS]
    latest = max((int(name) for name in names if name.isdigit()), default=0)
    if latest > now:
        said = "TensorBoard will not show what is logged from here on; report.py will"
        print(f"warning: this node's clock is at least {latest - now:.0f} s behind an earlier one: {said}", flush=True)


def writer() -> str:
    """This process, as it stands in the names of TensorBoard's files."""
    return f"{socket.gethostname()}.{os.getpid()}"


def cut(
    run_dir: Path, loggers: Sequence[Logger], reached: Mapping[str, int], events: Sequence[Mapping[str, Any]]
) -> None:
    """Take away what was logged after a checkpoint: the steps that follow it will be logged again.

    Only in the loggers' own folders, and so not what the nodes did meanwhile, which no step repeats; and only in the
    run directory, whose config may have been written by somebody else. Event files that a researcher has written there,
    with curves of a later evaluation, say, stay as they are.

    Args:
        reached: `positions` at the checkpoint; of a run that begins anew, those at its first start.
        events: what the run's attempts have noted.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            _go_on_after(logger, reached.get(os.path.relpath(Path(logger.log_dir, ROWS), run_dir), 0))
    for file, position in _of_attempts(run_dir, loggers, reached, events):
        if position is None:
            file.unlink()
        elif file.stat().st_size > position:
            os.truncate(file, position)


def cut_again(run_dir: Path, loggers: Sequence[Logger], events: Sequence[Mapping[str, Any]]) -> None:
    """Take away what an attempt that hung has written since a later one has gone on: it woke up with lines to write."""
    reached = [event.get("reached", {}) for event in events if event.get("event") == "start"]
    for file, position in _of_attempts(run_dir, loggers, reached[-1] if reached else {}, events):
        if position is not None and file.stat().st_size > position:
            os.truncate(file, position)


def _of_attempts(
    run_dir: Path, loggers: Sequence[Logger], reached: Mapping[str, int], events: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Path, int | None]]:
    """TensorBoard's files that attempts of this run have written, and where `reached` says that each had come."""
    noted = {(run_dir / name).parent for name in reached}
    for logger in loggers:
        for file in _files(logger, noted) if not isinstance(logger, CSVLogger) else ():
            if file.resolve().is_relative_to(run_dir.resolve()) and _is_of_attempt(file.name, events):
                yield file, reached.get(os.path.relpath(file, run_dir))


def _is_of_attempt(name: str, events: Sequence[Mapping[str, Any]]) -> bool:
    """Has an attempt written it? events.out.tfevents.TIME.HOST.PROCESS.NUMBER: other jobs have the same process ids."""
    time, _, rest = name.removeprefix(EVENTS).partition(".")
    ends = {str(event.get("attempt")): event.get("time") for event in events if event.get("event") == "end"}
    for start in events:
        begun, ended = start.get("time"), ends.get(str(start.get("attempt")), math.inf)
        if not (time.isdecimal() and isinstance(begun, int | float) and isinstance(ended, int | float)):
            continue
        if rest.startswith(f"{start.get('writer')}.") and begun - SKEW <= int(time) <= ended + SKEW:
            return True
    return False


def _files(logger: Logger, below: set[Path]) -> list[Path]:
    """The files of a logger, in its folder and in those `below` it that are its own, too."""
    if not isinstance(logger, TensorBoardLogger | CSVLogger):
        return []
    own = Path(logger.log_dir)
    if isinstance(logger, CSVLogger):
        return [file for file in [own / ROWS] if file.exists()]
    # Resolved: what a checkpoint has noted may lead out of the folder again.
    folders = {folder for folder in (own, *below) if folder.resolve().is_relative_to(own.resolve())}
    return sorted(file for folder in folders for file in folder.glob(f"{EVENTS}*"))


def _of_add_scalars(logger: Logger) -> set[Path]:
    """SummaryWriter.add_scalars has made these folders."""
    if not isinstance(logger, TensorBoardLogger) or logger._experiment is None:  # asking would make the first file
        return set()
    return {Path(folder) for folder in logger.experiment.all_writers or ()}


def _go_on_after(logger: CSVLogger, rows: int) -> None:
    """Let it append to its first rows. By itself it begins with removing its file, which is put back then."""
    file = Path(logger.log_dir, ROWS)
    aside = file.with_name(f".{ROWS}.part")
    if file.exists():  # else a start was killed below, between removing and putting back
        aside.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[: rows + 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Previous log files in this directory will be deleted"
        writer: Any = logger.experiment
    if rows and aside.exists():
        with aside.open(newline="", encoding="utf-8") as stream:
            writer.metrics_keys = next(csv.reader(stream))
        aside.replace(file)
    aside.unlink(missing_ok=True)
