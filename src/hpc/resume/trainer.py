"""The Trainer of an attempt: what the config describes, and what stops and resumes a run exactly."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden

from hpc.checkpoint import load_hooks, weights
from hpc.checkpoint.strategy_state import CheckpointMixin
from hpc.config import freezing, trust
from hpc.config.build import build, build_group
from hpc.config.errors import ConfigError
from hpc.config.run_checkpoint import find_checkpoint
from hpc.config.sections import Config
from hpc.data.same_data import SameData
from hpc.launch.placement import Placement
from hpc.logging import hyperparameters
from hpc.logging.curves import Curves
from hpc.logging.logged_names import MatchingConnector
from hpc.packed.staging import StagingProgress
from hpc.predict import prediction_writer
from hpc.predict.prediction_writer import PredictionWriter
from hpc.resume.changed_hyperparameters import HyperparameterUpdater
from hpc.resume.resume import Resume
from hpc.resume.stopping import ReportsTrial
from hpc.run import attempt_log
from hpc.strategies import single
from hpc.strategies.lockstep import Meeting
from hpc.strategies.parallelize import ModuleChanges
from hpc.training import progress, record, step_overhead
from hpc.training.attempt import Attempt


def make_trainer(
    run: Attempt, module: L.LightningModule, data: L.LightningDataModule, *, trial: ReportsTrial | None = None
) -> L.Trainer:
    """Make the Trainer that the config describes, with its loggers, callbacks and strategy.

    Callbacks are added to those of the config: they log curves, check that the data are still the same, save and resume
    the run, apply hyperparameters that changed between two attempts, and write predictions.

    Args:
        trial: what a run of a search reports to, on rank 0.

    Raises:
        ConfigError: the loggers, callbacks or checkpoint of the config cannot be used.
    """
    cfg = run.cfg
    _reject_other_kinds(cfg, module, data)
    if cfg.task == "predict":
        prediction_writer.require_predict_hooks(module, data)
    if run.process.is_reporting_rank and not run.checkpoint:
        trust.print_untrusted(cfg.node)
    ckpt = find_checkpoint(cfg.ckpt) if cfg.ckpt else None
    if cfg.task == "predict":
        ckpt = prediction_writer.checkpoint_to_load(run.run_dir, ckpt)
    rest = _load_weights(run, module, ckpt) if ckpt and not run.checkpoint else {}
    references = freezing.map_values_to_references(cfg.node)
    run_loggers = record.begin_logging(run, references)
    StagingProgress(run.watch)
    progress.silence_libraries()
    single.extend_group_timeouts()
    data_state = rest.get(type(data).__qualname__)
    callbacks: list[L.Callback] = [
        Curves(),
        SameData(run.run_dir),
        Resume(run, trial=trial),
        HyperparameterUpdater(cfg.model),
        *([DataState(data_state)] if data_state is not None else ()),
        *([PredictionWriter(run, ckpt)] if cfg.task == "predict" else ()),
        *build_group(cfg.callbacks),
    ]
    step_overhead.disable_noop_hooks(callbacks)
    trainer = _build_trainer(run, run_loggers, callbacks)
    trainer.strategy.references = references  # type: ignore[attr-defined]
    _configure_strategy(trainer, cfg, store=run.watch.store)
    hyperparameters.log_config(trainer, cfg, attempt=run.number)
    return trainer


def _load_weights(run: Attempt, module: L.LightningModule, ckpt: str) -> dict[str, Any]:
    """Load what the run begins with. Return the rest of the checkpoint for a test or prediction, which needs it."""
    if run.process.is_reporting_rank:
        print(f"the run begins with the weights of {ckpt}", flush=True)
    if run.cfg.task != "train":
        return load_hooks.load_trained(module, Path(ckpt))
    weights.load(module, ckpt)
    return {}


def _configure_strategy(trainer: Any, cfg: Config, *, store: Any) -> None:
    """Give the strategy what the config says of the module and the data, and what its ranks need to meet.

    Args:
        store: that all ranks reach; None for ranks that a person has placed.
    """
    trainer.strategy.changes = ModuleChanges(
        blocks=cfg.strategy.blocks,
        activation_checkpointing=cfg.strategy.activation_checkpointing,
        compile=cfg.strategy.compile,
        channels_last=cfg.strategy.channels_last,
        precision=str(cfg.trainer.precision),
    )
    trainer.strategy.stream_splits = cfg.data.get("stream_splits")
    if trainer.world_size == 1:  # with strategy=ddp, Lightning would recommend sync_dist=True here, too
        warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(")
    else:
        trainer._logger_connector.__class__ = MatchingConnector
        trainer.strategy.meeting = Meeting(store) if store else None


def _build_trainer(run: Attempt, run_loggers: list[Logger], callbacks: list[L.Callback]) -> L.Trainer:
    precision_plugins = single.double_precision_plugins(run.cfg.trainer.precision)
    if run.cfg.trainer.arguments.get("enable_progress_bar") is False:
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar)]
    # Without a bar among the callbacks, Lightning would add one of its own.
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    trainer = build(
        {"enable_progress_bar": has_bar} | dict(run.cfg.trainer.arguments),
        logger=run_loggers,
        callbacks=callbacks,
        precision=None if precision_plugins else run.cfg.trainer.precision,
        plugins=[_cluster_environment(run.process.place), *precision_plugins],
        # Otherwise Lightning would add a ModelCheckpoint: the project's own checkpoints decide about resuming.
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        _convert_="all",  # it wants lists
    )
    if not isinstance(trainer.strategy, CheckpointMixin):
        rule = "must name a strategy that saves and resumes a run"
        raise ConfigError("strategy.lightning._target_", type(trainer.strategy).__name__, rule, "strategy=ddp")
    return trainer


def _cluster_environment(place: Placement) -> ClusterEnvironment:
    """Return what tells Lightning its rank: the result of `launch`, so that it never guesses from SLURM_ variables."""
    return LightningEnvironment() if place.launcher == "none" else TorchElasticEnvironment()


class DataState(L.Callback):
    """Gives data that are tested or predicted what their class has saved, after `setup`, as Lightning does."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def setup(self, trainer: Any, pl_module: L.LightningModule, stage: str) -> None:
        trainer.datamodule.load_state_dict(self.state)


def _reject_other_kinds(cfg: Any, module: object, data: object) -> None:
    """Raise `ConfigError` if the class of the model or of the data is of another kind."""
    if not isinstance(module, L.LightningModule):
        is_former = any(base.__module__.startswith("pytorch_lightning.") for base in type(module).__mro__)
        rule = "must make a lightning.LightningModule"
        fix = "model=<another one>"
        if is_former:
            fix = "import hpc before pytorch_lightning, which then is lightning.pytorch"
        raise ConfigError("model._target_", cfg.model["_target_"], rule, fix)
    if isinstance(data, L.LightningModule):
        rule = "must make data, such as a lightning.LightningDataModule, and no module"
        raise ConfigError("data._target_", cfg.data["_target_"], rule, "data=<another one>")


def test(
    trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule, *, is_required: bool
) -> dict[str, float]:
    """Test the module, and return its metrics. If there is nothing to test, print a note.

    Raises:
        MisconfigurationException: nothing can be tested, and `is_required`.
    """
    owners_by_method = {"test_step": (module,), "test_dataloader": (data, module)}
    missing = [
        method
        for method, owners in owners_by_method.items()
        if not any(is_overridden(method, owner) for owner in owners)
    ]
    metrics = [] if missing and not is_required else trainer.test(module, data, verbose=False)
    if not metrics and trainer.is_global_zero:
        why = f"there is no {' and no '.join(missing)}" if missing else "there are no batches"
        print(f"note: nothing is tested: {why}", flush=True)
    return dict(metrics[0]) if metrics else {}


def predict(trainer: L.Trainer, module: L.LightningModule, data: L.LightningDataModule) -> dict[str, float]:
    """Predict what no earlier attempt has predicted, write all of it to a file, and return the number of samples."""
    (writer,) = [callback for callback in trainer.callbacks if isinstance(callback, PredictionWriter)]  # type: ignore[attr-defined]
    trainer.predict(module, data, return_predictions=False)
    if writer.is_joined:
        return {}
    num_samples = writer.finish(trainer)
    if not num_samples and trainer.is_global_zero:
        print("note: nothing is predicted: there are no batches", flush=True)
    return {"predict/samples": num_samples} if num_samples else {}


def finish(run: Attempt, trainer: L.Trainer, metrics: dict[str, Any]) -> None:
    """Record the result, and leave the verdict that the run is finished.

    Args:
        metrics: of the test or prediction.
    """
    hyperparameters.log_result(trainer, run.cfg, metrics=run.validation_metrics | metrics)
    trainer.strategy.barrier()
    if run.claim:
        values = {name: float(value) for name, value in metrics.items()}
        attempt_log.record_end(
            run.run_dir, run.claim, attempt=run.number, step=trainer.global_step, outcome="finished", metrics=values,
            validated=run.validation_metrics,
        )  # fmt: skip
    run.metrics = metrics if trainer.is_global_zero else {}
