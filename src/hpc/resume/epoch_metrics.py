"""Sums of the present epoch, of `self.log(on_epoch=True)` and of torchmetrics, saved and restored.

Each rank saves its own sums. If a run resumes with another number of ranks, rank 0 takes the sums of all old ranks
together and the others start with none, so that the value over all ranks is the same.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MetricTracker
from torchmetrics.wrappers.abstract import WrapperMetric

from hpc.config.errors import ConfigError
from hpc.logging.logged_names import MatchingResults
from hpc.privates.lightning import Metadata, ResultMetric, Sync

# The arguments with which a value was logged, as Lightning records them.
LOG_ARGUMENTS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
LOG_ARGUMENTS += ("dataloader_idx", "metric_attribute")
SHOWN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")  # attributes of the Trainer with the last values
SPEEDS = ("samples/s", "tokens/s", "mfu")  # of these values: those that callbacks.throughput measures in each attempt
MERGE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
    dim_zero_cat: lambda a, b: torch.cat([a, b]),
    torch.sum: torch.add,
    torch.mean: torch.add,  # a mean is held as a sum and a count
    torch.max: torch.maximum,
    torch.min: torch.minimum,
}


def state(trainer: L.Trainer, module: nn.Module) -> dict[str, Any]:
    """Return the sums of this rank, as plain data on the host."""
    results, validation = trainer.fit_loop.epoch_loop._results, trainer.fit_loop.epoch_loop.val_loop
    counts = not validation._should_reload_val_dl  # new loaders start at 0
    return {
        "logged": {key: _logged_state(result) for key, result in results.items()},
        "metrics": {name: _metric_state(metric) for name, metric in _metrics(module) if _has_seen(metric)},
        "dtypes": {name: metric._dtype for name, metric in _metrics(module)},
        "shown": {name: _on_host(_logged_only(getattr(trainer._logger_connector, f"_{name}"))) for name in SHOWN},
        # Batches of all validations so far, the x-axis of values that are logged at each of them.
        "validated": dict(validation._seen_batches_per_dataloader) if counts else {},
    }


def _logged_only(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in SPEEDS}


def restore(trainer: L.Trainer, module: nn.Module, *, states: list[dict[str, Any]], is_own: bool) -> None:
    """Restore the results of `state`.

    Args:
        states: [own state] if the world size is unchanged; else every old rank's state on rank 0, and rank 0's on the
            others.
        is_own: whether it is this rank's own.

    Raises:
        ConfigError: a metric is missing, or the states of a metric cannot be merged.
    """
    merged, *others = states
    for other in others:
        merged = _merge(module, merged, other)
    if not (is_own or trainer.is_global_zero):
        logged = {key: _with_neutral_sums(entry) for key, entry in merged["logged"].items()}
        merged = {**merged, "metrics": {}, "logged": logged}
    for path, tracker in module.named_modules():
        while isinstance(tracker, MetricTracker) and f"{path}.{len(tracker)}" in merged["dtypes"]:
            tracker.increment()  # it had made a metric for each epoch
    metrics, device = dict(_metrics(module)), trainer.strategy.root_device
    if missing := merged["dtypes"].keys() - metrics:
        rule = f"Metrics must be made before training begins: the resumed run lacks {min(missing)}"
        raise ConfigError("resume", None, rule, "make it in __init__ of the module", only_this_rank=True)
    for name, metric_state in merged["metrics"].items():
        _restore_metric(metrics[name], metric_state)
    results: Any = trainer.fit_loop.epoch_loop._results
    results.__class__ = ContinuedResults
    results.unchecked = set(merged["logged"])
    for key, entry in merged["logged"].items():
        results[key] = _make_result(entry, metrics, reduce=trainer.strategy.reduce).to(device)
    for name, dtype in merged["dtypes"].items():
        metrics[name]._dtype = dtype  # Lightning changes it with the first values, in double precision
    trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(merged.get("validated", {}))
    restore_shown_metrics(trainer, merged)


def restore_shown_metrics(trainer: L.Trainer, state: dict[str, Any]) -> None:
    """Let the Trainer show the last values before the save."""
    device = trainer.strategy.root_device
    for name in SHOWN:
        shown = state["shown"][name].items()
        setattr(trainer._logger_connector, f"_{name}", {key: _to(value, device) for key, value in shown})


class ContinuedResults(MatchingResults):
    """Lightning's results, with values that an earlier process has logged."""

    unchecked: set[str]  # keys that this process has not logged yet

    def log(self, fx: str, name: str, value: Any, **how: Any) -> None:  # type: ignore[override]
        if (key := f"{fx}.{name}") in self.unchecked:  # another number of ranks may reduce it in another way
            self.unchecked.discard(key)
            fn, group, rank_zero_only = (how[word] for word in ("sync_dist_fn", "sync_dist_group", "rank_zero_only"))
            self[key].meta.sync = Sync(fn, how["sync_dist"], rank_zero_only, _group=group)
        super().log(fx, name, value, **how)  # type: ignore[arg-type]


def _metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.items(keep_base=True, copy_state=False)  # metrics of a compute group share the sums of its first one
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Metric))


def _has_seen(metric: Metric) -> bool:
    """Return whether a metric has any sums; a wrapper does not count its updates."""
    return bool(metric._update_count) or isinstance(metric, WrapperMetric)


def _metric_state(metric: Metric) -> dict[str, Any]:
    sums = {name: _on_host(getattr(metric, name)) for name in metric._defaults}
    return {"sums": sums, "updates": metric._update_count, "last": _on_host(metric._forward_cache)}


def _restore_metric(metric: Metric, state: dict[str, Any]) -> None:
    for name, value in state["sums"].items():
        is_list = isinstance(value, list)
        setattr(metric, name, [tensor.to(metric.device) for tensor in value] if is_list else value.to(metric.device))
    metric._update_count, metric._computed, metric._forward_cache = state["updates"], None, state["last"]


def _logged_state(result: ResultMetric) -> dict[str, Any]:
    meta = result.meta
    sums = {name: _on_host(getattr(result, name)) for name in result._defaults} if result.is_tensor else {}
    return {
        "how": {name: getattr(meta, name) for name in LOG_ARGUMENTS},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "sums": sums,
        "updates": result._update_count,
        "last": _on_host(result._forward_cache),
    }


def _make_result(entry: dict[str, Any], metrics: dict[str, Metric], *, reduce: Callable[..., Any]) -> ResultMetric:
    """Make Lightning's record of a logged value from the result of `_logged_state`."""
    meta = Metadata(**entry["how"], reduce_fx=entry["reduce"])
    meta.sync = Sync(reduce, *entry["sync"])
    result = ResultMetric(meta, entry["is_tensor"])
    for name, value in entry["sums"].items():
        setattr(result, name, value.clone())
        result._defaults[name] = result._defaults[name].to(value.dtype)  # for the next epoch, too  # type: ignore
    if not result.is_tensor:
        result.value = metrics[entry["how"]["metric_attribute"]]
    result.has_reset, result._update_count, result._forward_cache = entry["has_reset"], entry["updates"], entry["last"]
    return result


def _with_neutral_sums(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the entry with sums that change nothing when they are merged."""
    neutral = {"min": torch.inf, "max": -torch.inf}.get(entry["reduce"], 0)
    return {**entry, "sums": {name: torch.full_like(value, neutral) for name, value in entry["sums"].items()}}


def _merge(module: nn.Module, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Merge the states of two ranks."""
    logged, metrics, modules = dict(a["logged"]), dict(a["metrics"]), dict(_metrics(module))
    for key, entry_b in b["logged"].items():
        entry_a = logged.get(key)
        if entry_a is None or entry_a["has_reset"]:
            logged[key] = entry_b
        elif not entry_b["has_reset"]:
            merge = MERGE[getattr(torch, entry_b["reduce"])]
            sums = {name: merge(entry_a["sums"][name], value) for name, value in entry_b["sums"].items()}
            logged[key] = {**entry_a, "sums": sums}
    for name, state in b["metrics"].items():
        metrics[name] = _merge_metric(name, modules[name], a=metrics[name], b=state) if name in metrics else state
    return {**a, "logged": logged, "metrics": metrics}


def _merge_metric(path: str, metric: Metric, *, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Merge the sums of two ranks. Raises `ConfigError` if the metric does not say how."""
    sums = {}
    for name, value in b["sums"].items():
        merge = MERGE.get(metric._reductions[name])
        if isinstance(value, list):
            sums[name] = a["sums"][name] + value
        elif merge is not None:
            sums[name] = merge(a["sums"][name], value)
        else:
            rule = f"{path} ({type(metric).__name__}) must define how the sums of several ranks are merged"
            raise ConfigError(
                "resume", None, rule, "as many devices as before, until this epoch has ended", only_this_rank=True
            )
    return {**a, "sums": sums, "updates": a["updates"] + b["updates"]}


def _on_host(value: Any) -> Any:
    """Return copies of tensors, also of those in lists and dicts; numbers as they are; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, list):
        return [_on_host(item) for item in value]
    if isinstance(value, int | float):
        return value
    return {name: _on_host(item) for name, item in value.items()} if isinstance(value, dict) else None


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
