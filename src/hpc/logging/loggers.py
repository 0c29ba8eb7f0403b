"""The loggers of a run, as the config names them: Lightning's, in one folder and under one id over all attempts."""

import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyExperiment  # pyright: ignore
from omegaconf import DictConfig, ListConfig

from hpc.checkpoint.on_disk import Checkpoint
from hpc.config.build import build
from hpc.config.errors import ConfigError, first_line
from hpc.config.freezing import with_references
from hpc.config.sections import Config

# Methods of a logger that training calls.
WRITING = ("log_metrics", "log_hyperparams", "save", "after_save_checkpoint", "finalize")
# Without these, wandb would send reports of its errors, and MLflow of its use, from a run that is to stay offline.
SENDS_NOTHING = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
ID_ARGUMENTS = {WandbLogger: "id", MLFlowLogger: "run_id"}  # by which a later attempt goes on in the same run


class DropsAll(Logger):
    """Stands for a logger that only rank 0 builds, or that could not be built, and drops what it gets."""

    name = version = None  # type: ignore[assignment]

    @property
    def experiment(self) -> DummyExperiment:
        return DummyExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def build_loggers(
    cfg: Config,
    checkpoint: Checkpoint | None,
    *,
    starts: Sequence[Mapping[str, Any]],
    writer: str,
    is_writing: bool,
) -> dict[str, Logger]:
    """Build the loggers of the config: named ones, of which those that are null are left out, or one, or a list.

    Args:
        checkpoint: the one that the run resumes from.
        starts: the start events of the run's earlier attempts.
        writer: the ending of this attempt's event files.
        is_writing: whether this rank is the one whose loggers write.

    Returns:
        By their names in the config; their numbers if they have none.

    Raises:
        ConfigError: `logger` is something else, or a table that is cut would lie outside the run directory.
    """
    nodes = cfg.logger
    if not isinstance(nodes, DictConfig) or "_target_" in nodes:
        nodes = dict(enumerate(nodes if isinstance(nodes, ListConfig) else [nodes]))
    nodes = {str(name): node for name, node in nodes.items() if node}
    for node in nodes.values():
        if not isinstance(node, DictConfig) or "_target_" not in node:
            rule = "must be named nodes, each with a _target_, or one such node, or a list of them"
            raise ConfigError("logger", node, rule, "see configs/logger/tensorboard.yaml")
    purge_step = checkpoint.details.get("stepped", checkpoint.step) + 1 if checkpoint else 0
    folders = [Path(str(cfg.run_dir), folder) for start in starts for folder in start.get("log_dirs", [])]
    ids = {name: id for start in starts for name, id in start.get("logger_ids", {}).items() if isinstance(id, str)}
    for variable, value in SENDS_NOTHING.items():
        os.environ.setdefault(variable, value)
    loggers = {}
    for name, node in nodes.items():
        loggers[name] = _build_logger(
            node, id=ids.get(name), folders=folders, purge_step=purge_step, writer=writer, is_writing=is_writing
        )
        _require_within(loggers[name], Path(str(cfg.run_dir)))
    return loggers


def _build_logger(
    node: DictConfig, *, id: str | None, folders: Sequence[Path], purge_step: int, writer: str, is_writing: bool
) -> Any:
    """Build one logger, which goes on with the folder or under the id of the run's earlier attempts, if it has one."""
    from hydra.errors import InstantiationException
    from hydra.utils import get_object

    logger_class = get_object(node._target_)
    options: dict[str, Any] = {}
    bases = logger_class.__mro__ if isinstance(logger_class, type) else ()
    if MLFlowLogger in bases and not is_writing:  # it opens its database when it is built
        return DropsAll()
    if TensorBoardLogger in bases:
        # A new run needs it, too: TensorBoard ignores the first purge step in a folder, and obeys only later ones.
        options = {"purge_step": purge_step, "filename_suffix": f"{node.get('filename_suffix') or ''}.{writer}"}
    for base in ID_ARGUMENTS.keys() & set(bases):
        has_own_id = any(node.get(argument) for argument in ("id", "version", "run_id"))
        options = {ID_ARGUMENTS[base]: id} if id and not has_own_id else {}
    options["_convert_"] = "all"  # wandb ignores settings that are no dict
    try:
        logger = build(node, **options)
    except InstantiationException as error:
        if MLFlowLogger not in bases:
            raise
        _warn(logger_class.__name__, error.__cause__ or error)  # of an attempt that was killed while it made the tables
        return DropsAll()
    if isinstance(logger, TensorBoardLogger | CSVLogger) and node.get("version") is None:
        own_folders = [folder for folder in folders if folder.parent == Path(logger.root_dir)]
        if own_folders:  # else Lightning would take the next free version at each start
            logger = build(node, **options, version=own_folders[-1].name)
    return logger


def _require_within(logger: Logger, run_dir: Path) -> None:
    """Raise `ConfigError` for a table outside the run directory."""
    if isinstance(logger, CSVLogger) and not Path(logger.log_dir).resolve().is_relative_to(run_dir.resolve()):
        rule = "must lie in the run directory: a run that resumes truncates its log, and others may write there"
        raise ConfigError("logger.save_dir", logger.log_dir, rule, "save_dir: ${run_dir} in the logger's node")


def start_ids(loggers: Mapping[str, Logger]) -> dict[str, str]:
    """Return the ids of the runs at W&B and MLflow by the loggers' names; those that do not exist yet are made."""
    started = {name: logger for name, logger in loggers.items() if isinstance(logger, tuple(ID_ARGUMENTS))}
    ids = {name: _attempt(logger, partial(_start_id, logger)) for name, logger in started.items()}
    return {name: id for name, id in ids.items() if id}


def _start_id(logger: Any) -> str:
    _ = logger.experiment  # starts the run
    return logger.version


def print_limits(loggers: Sequence[Logger]) -> None:
    """Print notes on what loggers cannot do: be shown by the report, or be cut back to a checkpoint."""
    if loggers and not any(isinstance(logger, TensorBoardLogger) for logger in loggers):
        rule = "report.py and tools/board.py show no curves of this run, as they read TensorBoard's files"
        print(f"note: {rule}. logger=[tensorboard,...] adds them", flush=True)
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger | CSVLogger):
            rule = "cannot be cut back to a checkpoint: steps that an interrupted attempt logged after it appear twice"
            print(f"note: {type(logger).__name__} {rule}", flush=True)


def curve_folders(run_dir: Path, loggers: Sequence[Logger]) -> list[str]:
    """Return the folders of the loggers, relative to the run directory."""
    return [os.path.relpath(logger.log_dir, run_dir) for logger in loggers if logger.log_dir]


def restrict_writing(loggers: Sequence[Logger], may_write: Callable[[], bool]) -> None:
    """Let CSV tables be written only while `may_write()`.

    An attempt that hung and woke up too late would otherwise replace them. TensorBoard's files belong to one attempt
    each; `positions.truncate_late_writes` removes what such an attempt has written there.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            logger.save = partial(_call_if, may_write, logger.save)  # type: ignore[method-assign]


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
            _warn(type(logger).__name__, error)


def _warn(name: str, error: BaseException) -> None:
    told = f"{name} cannot write: {type(error).__name__}: {first_line(error)}"
    print(f"warning: {told}. Training goes on; these curves lack what it could not write", flush=True)


def flush(loggers: Sequence[Logger]) -> None:
    """Write out what the loggers hold in memory."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            _attempt(logger, lambda logger=logger: logger.experiment.flush())
        elif isinstance(logger, CSVLogger):
            logger.save()


def tensorboard_loggers(trainer: L.Trainer) -> list[Any]:
    """Return the TensorBoard loggers of a Trainer."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
