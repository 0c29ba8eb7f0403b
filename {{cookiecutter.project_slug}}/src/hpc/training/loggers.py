"""The loggers of a run, as the config names them."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from omegaconf import DictConfig, ListConfig

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config.build import build
from hpc.config.errors import ConfigError


def build_loggers(
    cfg: DictConfig, checkpoint: Checkpoint | None, *, starts: Sequence[Mapping[str, Any]]
) -> list[Logger]:
    """Build the loggers of the config: one, a list, or named ones, of which those that are null are left out.

    Args:
        checkpoint: the one that the run resumes from.
        starts: the start events of the run's earlier attempts.

    Raises:
        ConfigError: `logger` is something else, or a CSV table would lie outside the run directory.
    """
    nodes = cfg.logger
    if isinstance(nodes, ListConfig):
        nodes = list(nodes)
    elif isinstance(nodes, DictConfig) and "_target_" not in nodes:
        nodes = list(nodes.values())
    else:
        nodes = [nodes]
    nodes = [node for node in nodes if node]
    if invalid := [node for node in nodes if not isinstance(node, DictConfig) or "_target_" not in node]:
        rule = "must be one node with a _target_, a list of such nodes, or named nodes"
        raise ConfigError("logger", invalid[0], rule, "see configs/logger/tensorboard.yaml")
    earlier_folders = [Path(cfg.run_dir, folder) for start in starts for folder in start.get("log_dirs", [])]
    loggers = [_build_logger(node, checkpoint, earlier_folders=earlier_folders) for node in nodes]
    run_dir = Path(cfg.run_dir).resolve()
    for logger in loggers:
        if isinstance(logger, CSVLogger) and not Path(logger.log_dir).resolve().is_relative_to(run_dir):
            rule = "must lie in the run directory: a run that resumes truncates its table, and others may write there"
            raise ConfigError("logger.save_dir", logger.root_dir, rule, "save_dir: ${run_dir} in the logger's node")
    return loggers


def _build_logger(node: DictConfig, checkpoint: Checkpoint | None, *, earlier_folders: Sequence[Path]) -> Any:
    """Build one logger, which writes into the folder of the run's earlier attempts, if there is one."""
    from hydra.utils import get_object

    logger_class, options = get_object(node._target_), {}
    if isinstance(logger_class, type) and issubclass(logger_class, TensorBoardLogger):
        # A new run needs it, too: TensorBoard ignores the first purge step in a folder, and obeys only later ones.
        options["purge_step"] = checkpoint.details.get("stepped", checkpoint.step) + 1 if checkpoint else 0
    logger = build(node, **options)
    if isinstance(logger, TensorBoardLogger | CSVLogger) and node.get("version") is None:
        own_folders = [folder for folder in earlier_folders if folder.parent == Path(logger.root_dir)]
        if own_folders:  # else Lightning would take the next free version at each start
            logger = build(node, **options, version=own_folders[-1].name)
    return logger


def curve_folders(run_dir: Path, loggers: Sequence[Logger]) -> list[str]:
    """Return the folders of the loggers, relative to the run directory."""
    return [os.path.relpath(logger.log_dir, run_dir) for logger in loggers if logger.log_dir]


def restrict_writing(loggers: Sequence[Logger], may_write: Callable[[], bool]) -> None:
    """Let CSV tables be written only while `may_write()`, as all attempts share one table.

    An attempt that hung and woke up too late would otherwise write into it. TensorBoard's files belong to one attempt
    each; `log_positions.truncate_late_writes` removes what such an attempt has written there.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            logger.save = partial(_save_if, may_write, logger.save)  # type: ignore[method-assign]


def _save_if(may_write: Callable[[], bool], save: Callable[[], None]) -> None:
    if may_write():
        save()


def flush(loggers: Sequence[Logger]) -> None:
    """Write out what the loggers hold in memory."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
        elif isinstance(logger, CSVLogger):
            logger.save()


def writer_name() -> str:
    """Return how TensorBoard names this process in its file names: host.pid."""
    return f"{socket.gethostname()}.{os.getpid()}"


def tensorboard_loggers(trainer: L.Trainer) -> list[Any]:
    """Return the TensorBoard loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
