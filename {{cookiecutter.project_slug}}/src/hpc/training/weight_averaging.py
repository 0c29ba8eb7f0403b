"""Lightning's callbacks that average weights: what they need to go on exactly, and to save what is tested.

WeightAveraging (EMAWeightAveraging) swaps its average in for a validation and at the end. StochasticWeightAveraging
puts it in at the end, and where there is batch norm adds an epoch that takes only its statistics.
"""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor

from hpc.config.errors import ConfigError

KINDS = (StochasticWeightAveraging, WeightAveraging)


def reject(trainer: L.Trainer) -> None:
    """Raise `ConfigError` where several callbacks average weights, or weights are averaged that no rank has whole."""
    averaging = [*_swa(trainer), *_moving(trainer)]
    if len(averaging) > 1:  # each swaps what another has put in place, and training would go on from an average
        names = " and ".join(type(callback).__name__ for callback in averaging)
        raise ConfigError("callbacks", names, "only one callback must average the weights", "one of them")
    if averaging and trainer.strategy.restore_checkpoint_after_setup:  # weights that are whole are there before
        rule = f"{type(averaging[0]).__name__} averages whole weights: the strategy must be single or ddp"
        raise ConfigError("callbacks", None, rule, "strategy=ddp, or training without this callback")


def prepare(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Before callbacks copy the module: Lightning converts it later, and averages in fp32 would round fp64 weights."""
    if [*_swa(trainer), *_moving(trainer)] and isinstance(trainer.precision_plugin, DoublePrecision):
        trainer.precision_plugin.convert_module(module)


def reject_other_callbacks(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Raise `ConfigError` where a run that averages its weights would go on without its callback."""
    states = [state for state in checkpoint["callbacks"].values() if isinstance(state, dict)]
    stochastic = any("average_model_state" in state and state.get("scheduler_state") for state in states)
    if (stochastic and not _swa(trainer)) or ("averaging_state" in checkpoint and not _moving(trainer)):
        rule = "a run that averages its weights must go on with the callback that averages them"
        raise ConfigError(
            "callbacks", None, rule, "the callbacks that the run began with, or a new run: ckpt=<checkpoint>"
        )


def go_on(trainer: L.Trainer, module: L.LightningModule) -> None:
    """In the middle of an epoch Lightning does not call what sets up stochastic averaging, nor in the last one."""
    statistics = takes_statistics(trainer)
    for swa in _swa(trainer):
        is_averaging = swa.swa_start <= trainer.current_epoch <= swa.swa_end
        if swa._scheduler_state is None or not (is_averaging or statistics):
            continue
        (optimizer,) = trainer.optimizers
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        before = swa._max_epochs, swa._latest_update_epoch
        if statistics:  # as if this were one more epoch to be averaged, which has been
            swa._max_epochs, swa._latest_update_epoch = before[0] + 1, trainer.current_epoch
        swa.on_train_epoch_start(trainer, module)
        if statistics:
            swa._max_epochs, swa._latest_update_epoch = before
        for group, restored in zip(optimizer.param_groups, groups, strict=True):
            group.update(restored)  # making the schedule has set a learning rate


def takes_statistics(trainer: L.Trainer) -> bool:
    """Is this, from its beginning on, the epoch that only takes the statistics of batch norm?"""
    return any(
        swa._model_contains_batch_norm and swa._max_epochs != -1 and trainer.current_epoch == swa.swa_end + 1
        for swa in _swa(trainer)
    )


def end(trainer: L.Trainer, module: L.LightningModule, *, trained: bool = True) -> bool:
    """Put the average in place now, before the last checkpoint; has the module other weights than the last step's?

    Args:
        trained: Lightning is about to say that training ends. It does not where nothing was left to be trained.
    """
    replaced = False
    for swa in _swa(trainer):
        done = trainer.current_epoch - 1  # the last epoch
        replaced |= done >= swa.swa_end or swa._max_epochs == -1
        swa.on_train_end(trainer, module)
        swa.on_train_end = lambda *_: None  # type: ignore[method-assign]
    for moving in _moving(trainer) if not trained else ():
        moving.on_train_end(trainer, module)
    return replaced


def about_to_change(trainer: L.Trainer) -> dict[str, Tensor] | None:
    """At the end of an epoch: a copy of the average that was validated, if it is changed now."""
    for moving in _moving(trainer):
        if moving._average_model is not None and moving.should_update(epoch_idx=trainer.current_epoch):
            return {key: value.detach().clone() for key, value in moving._average_model.module.state_dict().items()}
    return None


def updates(trainer: L.Trainer) -> int:
    """How often the averages have been updated so far."""
    return sum(int(moving._average_model.n_averaged) for moving in _moving(trainer) if moving._average_model)


def buffers(trainer: L.Trainer) -> list[Tensor]:
    """Of the averages: each rank has its own while it trains, as it has those of the module."""
    models = [moving._average_model.module for moving in _moving(trainer) if moving._average_model]
    return [buffer for model in models for buffer in model.buffers()]


def reject_end(averaged: bool) -> None:
    """Raise `ConfigError` where weights would be trained further that were averaged at the end."""
    if averaged:
        rule = "the weights of the run were averaged at its end, and must not be trained as if they were its last ones"
        raise ConfigError("resume", None, rule, "a new run from them: ckpt=<this run>/checkpoints/last.ckpt")


def _swa(trainer: Any) -> list[StochasticWeightAveraging]:
    return [callback for callback in trainer.callbacks if isinstance(callback, StochasticWeightAveraging)]


def _moving(trainer: Any) -> list[WeightAveraging]:
    return [callback for callback in trainer.callbacks if isinstance(callback, WeightAveraging)]
