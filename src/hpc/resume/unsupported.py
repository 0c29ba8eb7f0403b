"""Reject, before the first step, what a run could not resume exactly after an interruption."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

from hpc.checkpoint import weights
from hpc.checkpoint.optimizer_states import keeps_whole_state
from hpc.config.errors import ConfigError
from hpc.config.rules import UNSUPPORTED_CALLBACKS
from hpc.data.position import micro_batches_per_step
from hpc.privates import lightning as privates


def reject_unsupported_callbacks(trainer: L.Trainer) -> None:
    """Raise `ConfigError` for callbacks of the module, and for subclasses; `config.rules` has those of the config."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in UNSUPPORTED_CALLBACKS and kind.__module__.startswith(
                ("lightning.", "pytorch_lightning.")
            ):
                fix = "remove it from callbacks= and from the module's configure_callbacks"
                raise ConfigError("callbacks", type(callback).__name__, UNSUPPORTED_CALLBACKS[kind.__name__][0], fix)


def check_model_checkpoints(trainer: L.Trainer, run_dir: Path) -> None:
    """Let Lightning's ModelCheckpoint save beside the project's own checkpoints, which alone decide about resuming.

    Raises:
        ConfigError: it would save among them, or after an error.
    """
    for callback in (one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)):  # type: ignore[attr-defined]
        if callback.dirpath is None:
            callback.dirpath = str(run_dir / "model_checkpoints")
            if trainer.is_global_zero:
                print(f"note: {type(callback).__name__} saves in {callback.dirpath}", flush=True)
        folder, name = Path(callback.dirpath).resolve(), type(callback).__name__
        if folder.is_relative_to((run_dir / "checkpoints").resolve()):
            rule = "The folder of this callback must not be that of the checkpoints from which the run resumes"
            fix = "callbacks.<name>.dirpath=null (model_checkpoints/ in the run directory), or another folder"
            raise ConfigError("callbacks", f"{name}(dirpath={callback.dirpath})", rule, fix)
        if callback.save_on_exception:
            rule, _ = UNSUPPORTED_CALLBACKS["OnExceptionCheckpoint"]
            fix = "callbacks.<name>.save_on_exception=false"
            raise ConfigError("callbacks", f"{name}(save_on_exception=True)", rule, fix)


def reject_paths_outside(checkpoint: dict[str, Any]) -> None:
    """Raise `ConfigError` if a ModelCheckpoint would remove what is not below its folder; Lightning ignores `..`."""
    for name, state in checkpoint.get("callbacks", {}).items():
        if name.startswith("ModelCheckpoint") and isinstance(state, dict):
            paths = [
                *(state.get("best_k_models") or ()),
                state.get("last_model_path"),
                state.get("kth_best_model_path"),
            ]
            if outside := [path for path in paths if ".." in Path(str(path)).parts]:
                rule = "A checkpoint must name files without `..`"
                raise ConfigError("resume", outside[0], rule, "a run whose checkpoints nobody has edited")


def reject_unsupported_trainer(trainer: L.Trainer) -> None:
    """Raise `ConfigError` for a rule of `RULES` that is broken. Called once loaders and optimizers exist."""
    reject_missing_internals(trainer)
    for is_broken, key, value, rule, fix in RULES:
        if is_broken(trainer):
            raise ConfigError(key, value(trainer), f"{rule}, so that an interrupted run can resume exactly", fix)


def reject_missing_internals(trainer: Any) -> None:
    """Raise `ConfigError` for a torch or Lightning without a private name by which a run finds its place again."""
    if missing := privates.missing_place_names(trainer):
        rule = f"These lack {', '.join(sorted(missing))}, by which a resumed run finds its place"
        versions = f"lightning {L.__version__} and torch {torch.__version__}"
        fix = "pip install -c constraints.txt lightning torch"
        raise ConfigError(versions, None, rule, fix)


def reject_early_stopping_before_validation(trainer: Any, metrics: set[str]) -> None:
    """Raise `ConfigError` if EarlyStopping would need, at the end of an epoch, a metric of a later validation.

    Args:
        metrics: names of those that validation logs, as far as a sanity check has shown.
    """
    first_validation_step = min(trainer.num_training_batches, trainer.val_check_batch) / micro_batches_per_step(
        trainer, 0
    )
    ends_before = math.isfinite(first_validation_step) and 0 <= trainer.max_steps < math.ceil(first_validation_step)
    if not ends_before and (trainer.check_val_every_n_epoch or 1) == 1:
        return
    for callback in trainer.callbacks:
        # Lightning decides in `setup` when the callback checks, and only this private attribute shows it.
        needs_metric = isinstance(callback, EarlyStopping) and callback.strict and callback._check_on_train_epoch_end
        if needs_metric and (name := callback.monitor) in metrics:
            rule = f"A validation must come before the end of the first epoch, where EarlyStopping needs {name}"
            fix = "strict=false for this callback, or a smaller trainer.val_check_interval"
            raise ConfigError("callbacks", f"EarlyStopping(monitor={name})", rule, fix)


def weight_names(trainer: L.Trainer) -> set[str]:
    """Return the names of the weights that a checkpoint would hold."""
    return set(trainer.strategy.lightning_module_state_dict())


def reject_changed_names(trainer: L.Trainer, before: set[str]) -> None:
    """Raise `ConfigError` if weights were added or removed since a checkpoint would have been loaded."""
    if changed := sorted(weight_names(trainer) ^ before):
        rule = "Parameters and buffers must exist before training begins, or no checkpoint could be loaded. "
        rule += f"Since then these were added or removed: {', '.join(changed[:5])}"
        name = type(trainer.lightning_module).__name__
        raise ConfigError("model", name, rule, "make them in __init__, setup or configure_model of the module")


def _has_incomplete_step(trainer: L.Trainer) -> bool:
    """Return whether the last step of an epoch has fewer micro-batches."""
    num_batches = trainer.num_training_batches
    return math.isfinite(num_batches) and num_batches % trainer.accumulate_grad_batches != 0


def _describe_whole_state(trainer: L.Trainer) -> str:
    """Return the optimizers whose state cannot be cut, if ranks hold parts of the parameters; "" for none."""
    if not isinstance(trainer.strategy, ModelParallelStrategy):  # DeepSpeed saves the states of its own optimizers
        return ""
    kinds = {type(o).__name__ for o in trainer.optimizers if keeps_whole_state(getattr(o, "_optimizer", o))}
    return ", ".join(sorted(kinds))


def _describe_foreign_parameters(trainer: L.Trainer) -> str:
    """Return how many parameters of optimizers no checkpoint would hold; "" if there is none."""
    if isinstance(trainer.strategy, DeepSpeedStrategy | ModelParallelStrategy):  # theirs are other tensors by now
        return ""
    own = set(trainer.lightning_module.parameters())
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    num_foreign = sum(parameter not in own for group in groups for parameter in group["params"])
    return f"{num_foreign} parameters that do not belong to the model" if num_foreign else ""


def _describe_missing_weights(trainer: L.Trainer) -> str:
    """Return the weights that the module's own `state_dict` leaves out; "" if there is none."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):  # it saves them without `state_dict`
        return ""
    names = weights.names_not_in_state_dict(trainer.lightning_module)
    return f"state_dict() without {', '.join(names[:3])}{' ...' * (len(names) > 3)}" if names else ""


def _describe_unusable_loading(trainer: L.Trainer) -> str:
    """Return how the module's own `load_state_dict` rejects torch's arguments; "" if it accepts them."""
    load = trainer.lightning_module.load_state_dict
    try:
        inspect.signature(load).bind(state_dict={}, strict=True, assign=False)
    except TypeError as error:
        return f"{type(trainer.lightning_module).__name__}.load_state_dict: {error}"
    return ""


TrainerQuery = Callable[[L.Trainer], object]
# Whether the rule is broken, the key, its value, the rule, the fix.
RULES: list[tuple[TrainerQuery, str, TrainerQuery, str, str]] = [
    (
        lambda trainer: isinstance(trainer.fit_loop._data_fetcher, privates.DataLoaderIterDataFetcher),
        "model",
        lambda trainer: f"{type(trainer.lightning_module).__name__}.training_step(dataloader_iter)",
        "The training_step must take a batch, not an iterator",
        "def training_step(self, batch, batch_idx)",
    ),
    (
        lambda trainer: getattr(trainer, "_val_check_time_interval", None) is not None,
        "trainer.val_check_interval",
        lambda trainer: f"{trainer._val_check_time_interval:.0f} seconds",  # type: ignore[attr-defined]
        "must be a number of batches, not a time",
        "trainer.val_check_interval=<batches, or a fraction of an epoch>",
    ),
    (  # gradients of an incomplete step would go into the first step of the next epoch, and are not saved
        lambda trainer: isinstance(trainer.strategy, DeepSpeedStrategy) and _has_incomplete_step(trainer),
        "trainer.accumulate_grad_batches",
        lambda trainer: trainer.accumulate_grad_batches,
        "must divide the batches of an epoch under DeepSpeed, which counts micro-batches over epochs",
        "trainer.limit_train_batches=<a multiple of it>",
    ),
    (
        lambda trainer: not trainer.lightning_module.strict_loading,
        "model",
        lambda trainer: f"{type(trainer.lightning_module).__name__}.strict_loading=False",
        "A checkpoint must hold all weights, including frozen ones",
        "self.strict_loading = True, and a state_dict without gaps",
    ),
    (
        _describe_missing_weights,
        "model",
        lambda trainer: f"{type(trainer.lightning_module).__name__}, {_describe_missing_weights(trainer)}",
        "A checkpoint must hold all weights, including frozen ones",
        "a state_dict without gaps",
    ),
    (
        _describe_unusable_loading,
        "model",
        _describe_unusable_loading,
        "A load_state_dict must take the same arguments as torch's",
        "def load_state_dict(self, state_dict, strict=True, assign=False)",
    ),
    (
        _describe_whole_state,
        "model.optimizer",
        _describe_whole_state,
        "An optimizer must keep its whole state per parameter, in `state`, where ranks hold parts of the parameters",
        "strategy=ddp, or another optimizer",
    ),
    (
        lambda trainer: _describe_foreign_parameters(trainer),
        "model.optimizer",
        lambda trainer: _describe_foreign_parameters(trainer),
        "An optimizer must have parameters of the model only",
        "self.NAME = the part that the parameters belong to, in the model's __init__",
    ),
]
