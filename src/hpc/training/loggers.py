"""The loggers of a run, as the config names them."""

import os
import socket
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from omegaconf import DictConfig, ListConfig

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config.build import build
from hpc.config.errors import ConfigError, first_line
from hpc.config.freezing import with_references
from hpc.config.sections import Config
from hpc.training.log_positions import CutsItself

WRITING = ("log_metrics", "save", "after_save_checkpoint", "finalize")  # methods of a logger that training calls


def build_loggers(cfg: Config, checkpoint: Checkpoint | None, *, starts: Sequence[Mapping[str, Any]]) -> list[Logger]:
    """Build the loggers of the config: named ones, of which those that are null are left out, or one, or a list.

    Args:
        checkpoint: the one that the run resumes from.
        starts: the start events of the run's earlier attempts.

    Raises:
        ConfigError: `logger` is something else, or files that are cut would lie outside the run directory.
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
        rule = "must be named nodes, each with a _target_, or one such node, or a list of them"
        raise ConfigError("logger", invalid[0], rule, "see configs/logger/tensorboard.yaml")
    earlier_folders = [Path(cfg.run_dir, folder) for start in starts for folder in start.get("log_dirs", [])]
    loggers = [_build_logger(node, checkpoint, earlier_folders=earlier_folders) for node in nodes]
    run_dir = Path(cfg.run_dir).resolve()
    for logger in loggers:
        folder = logger.log_dir if isinstance(logger, CSVLogger) else logger.save_dir
        if isinstance(logger, CSVLogger | CutsItself) and not Path(folder).resolve().is_relative_to(run_dir):
            rule = "must lie in the run directory: a run that resumes truncates its log, and others may write there"
            raise ConfigError("logger.save_dir", folder, rule, "save_dir: ${run_dir} in the logger's node")
    return loggers


def print_limits(loggers: Sequence[Logger]) -> None:
    """Print notes on what loggers cannot do: be shown by the report, or be cut back to a checkpoint."""
    if loggers and not any(isinstance(logger, TensorBoardLogger) for logger in loggers):
        rule = "report.py and tools/board.py show no curves of this run, as they read TensorBoard's files"
        print(f"note: {rule}. logger=[tensorboard,...] adds them", flush=True)
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger | CSVLogger | CutsItself):
            rule = "cannot be cut back to a checkpoint: steps that an interrupted attempt logged after it appear twice"
            print(f"note: {type(logger).__name__} {rule}", flush=True)


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
    """Let CSV tables, wandb's files and MLflow's database be written only while `may_write()`.

    An attempt that hung and woke up too late would otherwise write into them. TensorBoard's files belong to one attempt
    each; `log_positions.truncate_late_writes` removes what such an attempt has written there.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            logger.save = partial(_call_if, may_write, logger.save)  # type: ignore[method-assign]
        elif isinstance(logger, CutsItself):
            logger.log_metrics = partial(_call_if, may_write, logger.log_metrics)  # type: ignore[method-assign]


def hide_secrets(loggers: Sequence[Logger], references: Mapping[str, str]) -> None:
    """Let loggers get references in place of hyperparameters from the environment, which may be secrets.

    Args:
        references: the result of `freezing.map_values_to_references`.
    """

    def log_hidden(log: Callable[..., None], params: Any, *args: Any, **kwargs: Any) -> None:
        params = vars(params) if isinstance(params, Namespace) else params
        log(with_references(params, references), *args, **kwargs)

    for logger in loggers if references else ():
        logger.log_hyperparams = partial(log_hidden, logger.log_hyperparams)  # type: ignore[method-assign]


def _call_if(may_write: Callable[[], bool], function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if may_write():
        function(*args, **kwargs)


def tolerate_failures(loggers: Sequence[Logger]) -> None:
    """Let a run go on where a logger cannot write, as its service has ended or its disk is full; it is told once."""
    for logger in loggers:
        for name in WRITING:
            setattr(logger, name, partial(_attempt, logger, getattr(logger, name)))


def _attempt(logger: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except ConfigError:
        raise
    except Exception as error:
        if not vars(logger).setdefault("has_failed", False):
            logger.has_failed = True
            told = f"{type(logger).__name__} cannot write: {type(error).__name__}: {first_line(error)}"
            print(f"warning: {told}. Training goes on; these curves lack what it could not write", flush=True)


def flush(loggers: Sequence[Logger]) -> None:
    """Write out what the loggers hold in memory."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            _attempt(logger, lambda logger=logger: logger.experiment.flush())
        elif isinstance(logger, CSVLogger):
            logger.save()
        elif isinstance(logger, CutsItself):
            _attempt(logger, logger.flush)


def writer_name() -> str:
    """Return how TensorBoard names this process in its file names: host.pid."""
    return f"{socket.gethostname()}.{os.getpid()}"


def tensorboard_loggers(trainer: L.Trainer) -> list[Any]:
    """Return the TensorBoard loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
