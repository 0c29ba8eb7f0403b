"""Private attributes of Lightning that this package uses, and why."""

from collections.abc import MutableMapping
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher as DataLoaderIterDataFetcher
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper as IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector as LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle as MaxSizeCycle
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

__all__ = [
    # A training_step that takes the iterator is recognised by how its batches are fetched.
    "DataLoaderIterDataFetcher",
    # The batch sampler that Lightning puts around another one, to record the indices of a prediction.
    "IndexBatchSamplerWrapper",
    # Values that ranks log are matched by their names, where Lightning reduces them in the order of the calls.
    "LoggerConnector",
    "Metadata",
    "ResultCollection",
    "ResultMetric",
    "Sync",
    # A loader whose sampler has a `set_epoch` is told each epoch, as Lightning does it.
    "set_sampler_epoch",
]

# The attribute of a module that Lightning sets before and after each hook, some forty times a step.
CURRENT_HOOK = "_current_fx_name"


def logged_step(trainer: Any) -> int:
    """Return the step that Lightning gives to logged values; `global_step` counts the steps of each optimizer."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def missing_place_names(trainer: Any) -> set[str]:
    """Return the names, by which a resumed run finds its place, that this Lightning or torch lacks.

    To set an attribute that nobody reads would raise no error: the run would resume elsewhere.

    Args:
        trainer: which has made its training loaders.
    """
    loop, iterator = trainer.fit_loop, trainer.fit_loop._combined_loader._iterator
    loops = loop, loop.epoch_loop, loop.epoch_loop.val_loop, loop.epoch_loop.automatic_optimization
    needed = [(part, name) for part in loops for name in ("_restarting", "_resuming_from_checkpoint")]
    needed += [(iterator, "_idx"), *[(iterator, "_consumed")] * isinstance(iterator, MaxSizeCycle)]
    needed += [(iter(IndexBatchSamplerWrapper(BatchSampler([], 1, False))), "seen_batch_indices")]
    missing = {f"{type(part).__name__}.{name}" for part, name in needed if not hasattr(part, name)}
    return missing | ({"_get_iterator"} - {*DataLoader.__iter__.__code__.co_names})


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
