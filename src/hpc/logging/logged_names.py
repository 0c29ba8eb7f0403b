"""What modules log on several ranks is reduced by its name: on a rank without this name it counts nothing."""

import zlib
from typing import Any

import torch
import torch.distributed as dist

from hpc.data.loader_agreement import extremes
from hpc.privates import lightning as privates

META_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
META_FIELDS += ("dataloader_idx", "metric_attribute")
STATES = ("value", "cumulated_batch_size")


class MatchingConnector(privates.LoggerConnector):
    """Lightning's own connector, which reduces values in the order in which each rank has logged them."""

    def on_batch_start(self, batch: Any, dataloader_idx: int | None = None) -> None:
        super().on_batch_start(batch, dataloader_idx)
        if meeting := self.trainer.strategy.meeting:  # type: ignore[attr-defined]
            meeting.num_steps += 1
        results = privates.results(self.trainer)
        if not isinstance(results, MatchingResults):
            results.__class__ = MatchingResults
        results.connector = self

    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        self.trainer.strategy.end_computing_along()  # type: ignore[attr-defined]
        if self.trainer.training:
            self.trainer.strategy.meet_after_steps()  # type: ignore[attr-defined]
        match_names(self.trainer)

    def on_epoch_end(self) -> None:
        match_names(self.trainer)  # hooks at the end of an epoch have logged, too
        super().on_epoch_end()

    def update_eval_step_metrics(self, step: int) -> None:
        if not self.trainer.strategy.is_computing_along:  # type: ignore[attr-defined]
            super().update_eval_step_metrics(step)


class MatchingResults(privates.ResultCollection):
    """Lightning's results, in which ranks agree about each value that is reduced as it is logged."""

    connector: MatchingConnector | None = None  # None: there is one rank

    @torch.compiler.disable
    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        result = self[key]
        if self.connector and result.is_tensor and result.meta.on_step and _is_reduced(result):
            self.connector.trainer.strategy.meet_to_log(result.meta.name, result.meta.fx)  # type: ignore[attr-defined]
        super().update_metrics(key, value, batch_size)  # pyright: ignore[reportAttributeAccessIssue]


def match_names(trainer: Any) -> None:
    """Let all ranks hold the same values to be reduced, in the same order. All of them call this.

    A rank without a batch has logged nothing. It gets all names, as what monitors a value expects it on each rank.
    """
    group, results = trainer.strategy.host_group, privates.results(trainer)
    if group is None or results is None:
        return
    logged = {key: result for key, result in results.valid_items() if result.meta.on_epoch}
    is_without_batch = not logged
    reduced = [key for key, result in logged.items() if _is_reduced(result)]
    checksum = zlib.crc32(repr((is_without_batch, reduced)).encode())
    least, most = extremes(checksum, group)
    if least == most:
        return
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, {key: _describe(result) for key, result in logged.items()}, group=group)
    names = {key: description for of_rank in of_ranks for key, description in of_rank.items()}
    for key in sorted(names):
        if key not in logged and (is_without_batch or names[key]["is_reduced"]):
            results[key] = _without_value(names[key], trainer)
        if key in results:
            results[key] = results.pop(key)


def _is_reduced(result: Any) -> bool:
    """Return whether a value is reduced over all ranks: a tensor by Lightning, a metric of torchmetrics by itself."""
    sync = result.meta.sync
    return not sync.rank_zero_only and sync.group is None and (sync.should or not result.is_tensor)


def _describe(result: Any) -> dict[str, Any]:
    """Return what another rank must know to hold the same name, as plain data."""
    return {
        "meta": {name: getattr(result.meta, name) for name in META_FIELDS},
        "reduce_fx": result.meta.reduce_fx.__name__,
        "is_synced": result.meta.sync.should,
        "is_reduced": _is_reduced(result),
        "dtypes": {name: str(getattr(result, name).dtype) for name in STATES if hasattr(result, name)}
        if result.is_tensor
        else None,
    }


def _without_value(description: dict[str, Any], trainer: Any) -> privates.ResultMetric:
    """Return a value that counts nothing in a sum or mean, and is neither the largest nor the smallest."""
    meta, dtypes = privates.Metadata(**description["meta"], reduce_fx=description["reduce_fx"]), description["dtypes"]
    meta.sync = privates.Sync(_should=description["is_synced"], fn=trainer.strategy.reduce)
    result = privates.ResultMetric(meta, is_tensor=dtypes is not None)
    for name, dtype in (dtypes or {}).items():
        state = getattr(result, name)
        setattr(result, name, state.to(trainer.strategy.root_device, getattr(torch, dtype.removeprefix("torch."))))
    if dtypes is None:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    privates.mark_as_updated(result)
    return result
