"""What an epoch has summed up so far: values of `self.log(on_epoch=True)` and torchmetrics, kept over an interruption.

Each rank keeps its own sums. Where another number of ranks goes on, rank 0 takes those of all old ranks together and
the others begin at nothing, so that a value over all ranks is the same.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.wrappers import MetricTracker
from torchmetrics.wrappers.abstract import WrapperMetric

from hpc.config.errors import ConfigError

# How a value was logged, as Lightning notes it.
HOW = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
HOW += ("dataloader_idx", "metric_attribute")
SHOWN = ("callback_metrics", "logged_metrics", "progress_bar_metrics")  # what the Trainer shows of the last values
SPEEDS = ("samples/s", "tokens/s", "mfu")  # of them: what callbacks.throughput has measured in this attempt
MERGE: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dim_zero_sum: torch.add,
    dim_zero_max: torch.maximum,
    dim_zero_min: torch.minimum,
    dim_zero_cat: lambda a, b: torch.cat([a, b]),
    torch.sum: torch.add,
    torch.mean: torch.add,  # of a mean the sum and the number are kept
    torch.max: torch.maximum,
    torch.min: torch.minimum,
}


def state(trainer: L.Trainer, module: nn.Module) -> dict[str, Any]:
    """Of this rank, as plain data on the host."""
    results, validation = trainer.fit_loop.epoch_loop._results, trainer.fit_loop.epoch_loop.val_loop
    reloads = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    counts = not reloads or validation._last_val_dl_reload_epoch == trainer.current_epoch  # new loaders begin at none
    return {
        "logged": {key: _logged(result) for key, result in results.items()},
        "metrics": {name: _summed(metric) for name, metric in _metrics(module) if _has_seen(metric)},
        "dtypes": {name: metric._dtype for name, metric in _metrics(module)},
        "shown": {name: _on_host(_logged_only(getattr(trainer._logger_connector, f"_{name}"))) for name in SHOWN},
        # Batches of validations so far, by which the values of each are drawn.
        "validated": dict(validation._seen_batches_per_dataloader) if counts else {},
    }


def _logged_only(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in SPEEDS}


def restore(trainer: L.Trainer, module: nn.Module, ranks: list[dict[str, Any]], *, is_own: bool) -> None:
    """Go on with what `state` returned.

    Args:
        ranks: this rank's own; or, where another number of ranks goes on, on rank 0 those of all old ranks, elsewhere
            that of one.
        is_own: is it this rank's own?

    Raises:
        ConfigError: a metric cannot be merged.
    """
    merged, *others = ranks
    for other in others:
        merged = _merged(module, merged, other)
    if not (is_own or trainer.is_global_zero):
        merged = {**merged, "metrics": {}, "logged": {key: _at_nothing(one) for key, one in merged["logged"].items()}}
    for tracker, tracked in ((path, part) for path, part in module.named_modules() if isinstance(part, MetricTracker)):
        while f"{tracker}.{len(tracked)}" in merged["dtypes"]:
            tracked.increment()  # it has made one for each epoch
    metrics, device = dict(_metrics(module)), trainer.strategy.root_device
    if new := merged["dtypes"].keys() - metrics:
        rule = f"metrics must be made before training begins, as a run that goes on lacks {min(new)}"
        raise ConfigError("resume", None, rule, "make it in __init__ of the module", only_this_rank=True)
    for name, summed in merged["metrics"].items():
        _restore_metric(metrics[name], summed)
    results: Any = trainer.fit_loop.epoch_loop._results
    results.__class__ = ContinuedResults
    results.unchecked = set(merged["logged"])
    for key, one in merged["logged"].items():
        results[key] = _restored(one, metrics, trainer.strategy.reduce).to(device)
    for name, dtype in merged["dtypes"].items():
        metrics[name]._dtype = dtype  # Lightning changes it with the first values, in double precision
    trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader.update(merged.get("validated", {}))
    show(trainer, merged)


def show(trainer: L.Trainer, state: dict[str, Any]) -> None:
    """Let the Trainer show the values that it has shown last."""
    device = trainer.strategy.root_device
    for name in SHOWN:
        shown = state["shown"][name].items()
        setattr(trainer._logger_connector, f"_{name}", {key: _to(value, device) for key, value in shown})


class ContinuedResults(_ResultCollection):
    """Lightning's, with values that were logged by an earlier process."""

    unchecked: set[str]  # that were not logged by this one yet

    def log(self, fx: str, name: str, value: Any, **how: Any) -> None:  # type: ignore[override]
        if (key := f"{fx}.{name}") in self.unchecked:  # another number of ranks exchanges it in another way
            self.unchecked.discard(key)
            fn, group, rank_zero_only = (how[word] for word in ("sync_dist_fn", "sync_dist_group", "rank_zero_only"))
            self[key].meta.sync = _Sync(fn, how["sync_dist"], rank_zero_only, _group=group)
        _ResultCollection.log(self, fx, name, value, **how)  # type: ignore[arg-type]


def _metrics(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.items(keep_base=True, copy_state=False)  # metrics of one group share the sums of its first one
    return ((name, part) for name, part in module.named_modules() if isinstance(part, Metric))


def _has_seen(metric: Metric) -> bool:
    """Has it anything summed up? A wrapper does not count its updates."""
    return bool(metric._update_count) or isinstance(metric, WrapperMetric)


def _summed(metric: Metric) -> dict[str, Any]:
    sums = {name: _on_host(getattr(metric, name)) for name in metric._defaults}
    return {"sums": sums, "updates": metric._update_count, "last": _on_host(metric._forward_cache)}


def _restore_metric(metric: Metric, summed: dict[str, Any]) -> None:
    for name, value in summed["sums"].items():
        is_list = isinstance(value, list)
        setattr(metric, name, [one.to(metric.device) for one in value] if is_list else value.to(metric.device))
    metric._update_count, metric._computed, metric._forward_cache = summed["updates"], None, summed["last"]


def _logged(result: _ResultMetric) -> dict[str, Any]:
    meta = result.meta
    sums = {name: _on_host(getattr(result, name)) for name in result._defaults} if result.is_tensor else {}
    return {
        "how": {name: getattr(meta, name) for name in HOW},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "sums": sums,
        "updates": result._update_count,
        "last": _on_host(result._forward_cache),
    }


def _restored(one: dict[str, Any], metrics: dict[str, Metric], reduce: Callable[..., Any]) -> _ResultMetric:
    meta = _Metadata(**one["how"], reduce_fx=one["reduce"])
    meta.sync = _Sync(reduce, *one["sync"])
    result = _ResultMetric(meta, one["is_tensor"])
    for name, value in one["sums"].items():
        setattr(result, name, value.clone())
        result._defaults[name] = result._defaults[name].to(value.dtype)  # of the next epoch, too  # type: ignore
    if not result.is_tensor:
        result.value = metrics[one["how"]["metric_attribute"]]
    result.has_reset, result._update_count, result._forward_cache = one["has_reset"], one["updates"], one["last"]
    return result


def _at_nothing(one: dict[str, Any]) -> dict[str, Any]:
    blank = {"min": torch.inf, "max": -torch.inf}.get(one["reduce"], 0)
    return {**one, "sums": {name: torch.full_like(value, blank) for name, value in one["sums"].items()}}


def _merged(module: nn.Module, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    logged, metrics, parts = dict(a["logged"]), dict(a["metrics"]), dict(_metrics(module))
    for key, its in b["logged"].items():
        mine = logged.get(key)
        if mine is None or mine["has_reset"]:
            logged[key] = its
        elif not its["has_reset"]:
            merge = MERGE[getattr(torch, its["reduce"])]
            sums = {name: merge(mine["sums"][name], value) for name, value in its["sums"].items()}
            logged[key] = {**mine, "sums": sums}
    for name, its in b["metrics"].items():
        metrics[name] = _merged_metric(name, parts[name], metrics[name], its) if name in metrics else its
    return {**a, "logged": logged, "metrics": metrics}


def _merged_metric(path: str, metric: Metric, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    sums = {}
    for name, value in b["sums"].items():
        merge = MERGE.get(metric._reductions[name])
        if isinstance(value, list):
            sums[name] = a["sums"][name] + value
        elif merge is not None:
            sums[name] = merge(a["sums"][name], value)
        else:
            rule = f"{path} ({type(metric).__name__}) must say how to merge what several ranks have summed up"
            raise ConfigError(
                "resume", None, rule, "as many devices as before, until this epoch has ended", only_this_rank=True
            )
    return {**a, "sums": sums, "updates": a["updates"] + b["updates"]}


def _on_host(value: Any) -> Any:
    """Tensors copied, also those in lists and dicts; numbers; None for anything else."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, list):
        return [_on_host(one) for one in value]
    if isinstance(value, int | float):
        return value
    return {name: _on_host(one) for name, one in value.items()} if isinstance(value, dict) else None


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
