"""Private attributes of Lightning that this package uses, and why."""

from collections.abc import MutableMapping
from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector as LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync
from torch import nn

# Values that ranks log are matched by their names, where Lightning reduces them in the order of the calls.
__all__ = ["LoggerConnector", "Metadata", "ResultCollection", "ResultMetric", "Sync"]

# The attribute of a module that Lightning sets before and after each hook, some forty times a step.
CURRENT_HOOK = "_current_fx_name"


def logged_step(trainer: Any) -> int:
    """Return the step that Lightning gives to logged values; `global_step` counts the steps of each optimizer."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def is_accumulating(trainer: Any) -> bool:
    """Return whether the optimizer's step is still to come after this batch; an epoch may end with fewer batches."""
    return trainer.fit_loop._should_accumulate()


def progress_bar_metrics(trainer: Any) -> MutableMapping[str, float]:
    """Return what the progress bar shows.

    `trainer.progress_bar_metrics` will not do: at the end of an epoch, reading it makes all ranks reduce metrics.
    """
    return trainer._logger_connector._progress_bar_metrics


def results(trainer: Any) -> Any:
    """Return the values that the running loop has logged, which Lightning gives out only once they are reduced."""
    return trainer._results


def ddp_options(strategy: Any) -> dict[str, Any]:
    """Return the arguments of DistributedDataParallel, which change when a module is wrapped anew."""
    return strategy._ddp_kwargs


def device_mesh(strategy: Any) -> Any:
    """Return the mesh of ModelParallelStrategy, before its setup too; None for other strategies."""
    return getattr(strategy, "_device_mesh", None)


def average_of(callback: WeightAveraging) -> nn.Module | None:
    """Return the network that holds the average; None before the first setup."""
    return callback._average_model.module if callback._average_model else None


def num_averaged(callback: WeightAveraging) -> int:
    """Return how often the average has been updated, which says whether a saved one is still the present one."""
    return int(callback._average_model.n_averaged) if callback._average_model else 0


def has_saved_schedule(callback: StochasticWeightAveraging) -> bool:
    """Return whether a checkpoint has given a schedule that Lightning takes up at the beginning of an epoch only."""
    return callback._scheduler_state is not None


def mark_as_updated(result: Any) -> None:
    """Let a value count as logged, as torchmetrics warns of one that is computed without an update."""
    result._update_count = 1
