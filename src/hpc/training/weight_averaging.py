"""Lightning's callbacks that average weights: resume them exactly, and save the weights that are tested.

WeightAveraging (EMAWeightAveraging) swaps its average in for a validation and at the end. StochasticWeightAveraging
puts its average in at the end.
"""

import math
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor

from hpc.config.errors import ConfigError
from hpc.privates.lightning import average_of, has_saved_schedule, num_averaged

AVERAGING_CALLBACKS = (StochasticWeightAveraging, WeightAveraging)


def reject_unsupported_averaging(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Raise `ConfigError` for several averages, for one of sharded weights, and for SWA of a network with BatchNorm."""
    averaging = [*_stochastic_callbacks(trainer), *_moving_callbacks(trainer)]
    if len(averaging) > 1:  # each swaps what another has put in place, and training would go on from an average
        names = " and ".join(type(callback).__name__ for callback in averaging)
        raise ConfigError("callbacks", names, "Only one callback may average the weights", "one of them")
    if averaging and trainer.strategy.restore_checkpoint_after_setup:  # true of the strategies that shard
        name = type(averaging[0]).__name__
        rule = "It averages whole weights, so the strategy must be single or ddp"
        raise ConfigError("callbacks", name, rule, "strategy=ddp, or training without this callback")
    for swa in _stochastic_callbacks(trainer):
        if swa.pl_module_contains_batch_norm(module):
            rule = "must not be used for a network with BatchNorm: Lightning adds an epoch that takes its statistics, "
            rule += "in which a run could not be interrupted and resumed"
            fix = "lightning.pytorch.callbacks.EMAWeightAveraging, which averages the statistics, too; or a "
            fix += "normalization without statistics of the data, as GroupNorm"
            raise ConfigError("callbacks", type(swa).__name__, rule, fix)


def convert_to_float64_before_copy(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Convert the module to float64 before callbacks copy it: Lightning does so later, but a copy would be float32."""
    averaging = [*_stochastic_callbacks(trainer), *_moving_callbacks(trainer)]
    if averaging and isinstance(trainer.precision_plugin, DoublePrecision):
        trainer.precision_plugin.convert_module(module)


def reject_missing_callback(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Raise `ConfigError` if a run that averages its weights would resume without its callback."""
    states = [state for state in checkpoint["callbacks"].values() if isinstance(state, dict)]
    was_stochastic = any("average_model_state" in state and state.get("scheduler_state") for state in states)
    lacks_stochastic = was_stochastic and not _stochastic_callbacks(trainer)
    if lacks_stochastic or ("averaging_state" in checkpoint and not _moving_callbacks(trainer)):
        rule = "must hold the callback that averages the weights of this run"
        fix = "the callbacks that the run started with, or a new run: ckpt=<checkpoint>"
        raise ConfigError("callbacks", None, rule, fix)


def resume_averaging(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Set up stochastic averaging where a run resumes in the middle of an epoch.

    Lightning does not call there what sets it up.
    """
    for swa in _stochastic_callbacks(trainer):
        if not has_saved_schedule(swa) or not swa.swa_start <= trainer.current_epoch <= swa.swa_end:
            continue
        (optimizer,) = trainer.optimizers
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        swa.on_train_epoch_start(trainer, module)
        for group, restored in zip(optimizer.param_groups, groups, strict=True):
            group.update(restored)  # the new schedule has set a learning rate


def apply_average(trainer: L.Trainer, module: L.LightningModule, *, will_call_on_train_end: bool) -> bool:
    """Copy the averaged weights into the module now. Return whether SWA did so; moving averages may do so later.

    Args:
        will_call_on_train_end: Lightning is about to call `on_train_end`. It does not if no step was left to train.
    """
    is_applied = False
    for swa in _stochastic_callbacks(trainer):
        last_epoch = trainer.current_epoch - 1
        is_applied |= last_epoch >= swa.swa_end or math.isinf(swa.swa_end)  # infinite: the steps end the run
        swa.on_train_end(trainer, module)
        swa.on_train_end = lambda *_: None  # type: ignore[method-assign]
    for moving in _moving_callbacks(trainer) if not will_call_on_train_end else ():
        moving.on_train_end(trainer, module)
    return is_applied


def copy_average_before_update(trainer: L.Trainer) -> dict[str, Tensor] | None:
    """Return a copy of the average that was validated, if the end of this epoch changes it; else None."""
    for moving in _moving_callbacks(trainer):
        average = average_of(moving)
        if average is not None and moving.should_update(epoch_idx=trainer.current_epoch):
            return {key: value.detach().clone() for key, value in average.state_dict().items()}
    return None


def num_updates(trainer: L.Trainer) -> int:
    """Return how often the averages have been updated so far."""
    return sum(map(num_averaged, _moving_callbacks(trainer)))


def reject_resume_from_averaged(is_averaged: bool) -> None:
    """Raise `ConfigError` if weights would be trained further that were averaged at the end of the run."""
    if is_averaged:
        rule = "The weights of this run were averaged at its end, so they cannot be trained further"
        raise ConfigError("resume", None, rule, "a new run from them: ckpt=<this run>/checkpoints/last.ckpt")


def _stochastic_callbacks(trainer: Any) -> list[StochasticWeightAveraging]:
    return [callback for callback in trainer.callbacks if isinstance(callback, StochasticWeightAveraging)]


def _moving_callbacks(trainer: Any) -> list[WeightAveraging]:
    return [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
