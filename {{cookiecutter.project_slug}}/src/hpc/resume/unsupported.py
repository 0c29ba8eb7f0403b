"""What a run cannot go on with exactly after an interruption, rejected before its first step."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS

from hpc.checkpoint import weights
from hpc.config.callback_rules import UNSUPPORTED_CALLBACKS
from hpc.config.errors import ConfigError
from hpc.data.position import accumulate
from hpc.training.released_layers import shown


def reject_callbacks(trainer: L.Trainer) -> None:
    """Reject callbacks that a module brings, or that are derived, as preflight does for those of the config."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind in type(callback).__mro__:
            if kind.__name__ in UNSUPPORTED_CALLBACKS and kind.__module__.startswith(
                ("lightning.", "pytorch_lightning.")
            ):
                fix = "leave it out of callbacks= and of the module's configure_callbacks"
                raise ConfigError("callbacks", type(callback).__name__, UNSUPPORTED_CALLBACKS[kind.__name__][0], fix)


def check(trainer: L.Trainer) -> None:
    """When loaders and optimizers are there. Raises `ConfigError`."""
    for is_broken, key, value, rule, fix in RULES:
        if is_broken(trainer):
            raise ConfigError(key, value(trainer), f"{rule}, so that an interrupted run can go on exactly", fix)


def reject_unvalidated(trainer: Any, metrics: set[str]) -> None:
    """Raise `ConfigError` where EarlyStopping would ask, at the end of an epoch, for a metric of a validation to come.

    Args:
        metrics: those that validation logs, as far as a sanity check has shown.
    """
    first = min(trainer.num_training_batches, trainer.val_check_batch) / accumulate(trainer, 0)
    ends_before = 0 <= trainer.max_steps < math.ceil(first) if math.isfinite(first) else False
    if not ends_before and (trainer.check_val_every_n_epoch or 1) == 1:
        return
    for callback in trainer.callbacks:
        # Lightning decides in `setup` when it asks, and says so nowhere else.
        asks = isinstance(callback, EarlyStopping) and callback.strict and callback._check_on_train_epoch_end
        if asks and callback.monitor in metrics:
            rule = f"it asks for {callback.monitor} at the end of the first epoch: a validation must come before"
            fix = "strict=false for this callback, or a smaller trainer.val_check_interval"
            raise ConfigError("callbacks", f"EarlyStopping(monitor={callback.monitor})", rule, fix)


def names(trainer: L.Trainer) -> set[str]:
    """Of the weights that a checkpoint would hold."""
    return set(trainer.strategy.lightning_module_state_dict())


def reject_lazy(module: L.LightningModule) -> None:
    """Reject layers that get their sizes only from the first batch: into them no checkpoint can be read."""
    weights = [*module.named_parameters(), *module.named_buffers()]
    if lazy := [name for name, weight in weights if is_lazy(weight)]:
        rule = "layers must have their sizes before training begins, or no checkpoint could be loaded"
        fix = "the layer that is not lazy, as torch.nn.Linear, or an example through the network once in __init__"
        raise ConfigError("model", shown(lazy), rule, fix)


def reject_others(trainer: L.Trainer, before: set[str]) -> None:
    """Raise `ConfigError` where weights have come or gone since a checkpoint would have been loaded."""
    if others := sorted(names(trainer) ^ before):
        rule = "parameters and buffers must be there before training begins, or no checkpoint could be loaded; "
        rule += f"since then these have come or gone: {', '.join(others[:5])}"
        name = type(trainer.lightning_module).__name__
        raise ConfigError("model", name, rule, "make them in __init__, setup or configure_model of the module")


def _has_rest(trainer: L.Trainer) -> bool:
    num = trainer.num_training_batches
    return math.isfinite(num) and num % trainer.accumulate_grad_batches != 0


def _kept_beside(trainer: L.Trainer) -> str:
    """An optimizer that wraps another one, say, and what it keeps besides."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):  # which saves all of its own
        return ""
    known = {"state", "param_groups"}
    kept = {type(one).__name__: sorted(one.state_dict().keys() - known) for one in trainer.optimizers}
    return "; ".join(f"{name} ({', '.join(keys)})" for name, keys in kept.items() if keys)


def _foreign(trainer: L.Trainer) -> str:
    """How many parameters nobody would save."""
    if isinstance(trainer.strategy, DeepSpeedStrategy | ModelParallelStrategy):  # theirs are other tensors by now
        return ""
    own = set(trainer.lightning_module.parameters())
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    num = sum(parameter not in own for group in groups for parameter in group["params"])
    return f"{num} parameters that are none of the model's" if num else ""


def _left_out(trainer: L.Trainer) -> str:
    """Weights that a module's own `state_dict` leaves out."""
    if isinstance(trainer.strategy, DeepSpeedStrategy):  # which saves them without it
        return ""
    names = weights.left_out(trainer.lightning_module)
    return f"state_dict() without {', '.join(names[:3])}{' ...' * (len(names) > 3)}" if names else ""


def _not_called(trainer: L.Trainer) -> str:
    """A module's own `load_state_dict` that does not take what torch gives it."""
    load = trainer.lightning_module.load_state_dict
    try:
        inspect.signature(load).bind(state_dict={}, strict=True, assign=False)
    except TypeError as error:
        return f"{type(trainer.lightning_module).__name__}.load_state_dict: {error}"
    return ""


Ask = Callable[[L.Trainer], object]
RULES: list[tuple[Ask, str, Ask, str, str]] = [
    (
        lambda trainer: isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher),
        "model",
        lambda trainer: f"{type(trainer.lightning_module).__name__}.training_step(dataloader_iter)",
        "training_step must be given its batches",
        "def training_step(self, batch, batch_idx)",
    ),
    (
        lambda trainer: trainer.reload_dataloaders_every_n_epochs > 1,  # type: ignore[attr-defined]
        "trainer.reload_dataloaders_every_n_epochs",
        lambda trainer: trainer.reload_dataloaders_every_n_epochs,  # type: ignore[attr-defined]
        "loaders must be made at each epoch or once",
        "trainer.reload_dataloaders_every_n_epochs=1, or 0",
    ),
    (
        lambda trainer: getattr(trainer, "_val_check_time_interval", None) is not None,
        "trainer.val_check_interval",
        lambda trainer: f"{trainer._val_check_time_interval:.0f} seconds",  # type: ignore[attr-defined]
        "validation must follow a number of batches, not the clock, which does not repeat itself",
        "trainer.val_check_interval=<batches, or a fraction of an epoch>",
    ),
    (  # gradients of a lone micro-batch would go into the next epoch's first step, and are not saved
        lambda trainer: isinstance(trainer.strategy, DeepSpeedStrategy) and _has_rest(trainer),
        "trainer.accumulate_grad_batches",
        lambda trainer: trainer.accumulate_grad_batches,
        "under DeepSpeed, which counts micro-batches over epochs, the batches of an epoch must be divisible by it",
        "trainer.limit_train_batches=<a multiple of it>",
    ),
    (
        lambda trainer: not trainer.lightning_module.strict_loading,
        "model",
        lambda trainer: f"{type(trainer.lightning_module).__name__}.strict_loading=False",
        "strict_loading must be True: a checkpoint must hold all weights, frozen ones, too",
        "self.strict_loading = True, and a state_dict without gaps",
    ),
    (
        _left_out,
        "model",
        lambda trainer: f"{type(trainer.lightning_module).__name__}, {_left_out(trainer)}",
        "a checkpoint must hold all weights, frozen ones, too",
        "a state_dict without gaps",
    ),
    (
        _not_called,
        "model",
        _not_called,
        "load_state_dict must take the arguments that it has in torch",
        "def load_state_dict(self, state_dict, strict=True, assign=False)",
    ),
    (
        lambda trainer: any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers),
        "model.optimizer",
        lambda trainer: "LBFGS",
        "an optimizer must keep its state by parameter",
        "another optimizer",
    ),
    (
        lambda trainer: _kept_beside(trainer),
        "model.optimizer",
        lambda trainer: _kept_beside(trainer),
        "an optimizer must keep its state by parameter, in `state` alone",
        "another optimizer",
    ),
    (
        lambda trainer: _foreign(trainer),
        "model.optimizer",
        lambda trainer: _foreign(trainer),
        "an optimizer must have parameters of the model only",
        "self.NAME = the part that the parameters belong to, in the model's __init__",
    ),
]
