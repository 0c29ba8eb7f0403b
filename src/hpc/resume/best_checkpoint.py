"""The best checkpoint so far, by the metric that `checkpoint.monitor` names."""

import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc.checkpoint import on_disk
from hpc.config.errors import ConfigError
from hpc.config.sections import CheckpointConfig


class BestCheckpoint:
    """Keeps the value and the folder of the best checkpoint, and the link `best.ckpt` to it.

    Attributes:
        value: its metric; None: no checkpoint is the best yet, by the present metric.
        folder: its name.
    """

    def __init__(self, settings: CheckpointConfig) -> None:
        self.monitor, self.mode = settings.monitor, settings.mode
        self.value: float | None = None
        self.folder: str | None = None
        self._published: tuple[float | None, str | None] = None, None  # value and folder that best.ckpt leads to
        self._is_compared = False  # whether ranks were asked for the metric

    def is_beaten_by(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metrics of a validation are better."""
        if not self.monitor:
            return False
        value = metrics[self.monitor]
        if not math.isfinite(value) or self.value is None:
            return math.isfinite(value)
        return value < self.value if self.mode == "min" else value > self.value

    def replace(self, metrics: Mapping[str, float], *, folder: str) -> None:
        """Take a checkpoint that is about to be written as the best one."""
        self.value, self.folder = metrics[self.monitor or ""], folder

    def confirm(self) -> None:
        """Record that the checkpoint is on the disk."""
        self._published = self.value, self.folder

    def revert(self) -> None:
        """Return to the checkpoint that was confirmed last, as a later one was not written."""
        self.value, self.folder = self._published

    def reject_unknown_monitor(self, names: Set[str], *, shown: Set[str]) -> None:
        """Raise `ConfigError` if the monitored metric is not among these names of logged metrics.

        Args:
            shown: those that validations log.
        """
        if self.monitor and self.monitor not in names:
            known = ", ".join(sorted(shown)) or "none"
            rule = f"must be a metric that is logged in validation (there are: {known})"
            raise ConfigError("checkpoint.monitor", self.monitor, rule, "one of them, or checkpoint.monitor=null")

    def note_differing_metric(self, metrics: Mapping[str, float], group: Any) -> None:
        """Print once if ranks have different values of the metric: rank 0's decides. Called by all ranks.

        Args:
            group: of all ranks, on the host; None: there is one rank.
        """
        if group is None or not self.monitor or self._is_compared:
            return
        self._is_compared = True
        max_and_minus_min = torch.tensor([metrics[self.monitor], -metrics[self.monitor]], dtype=torch.float64)
        dist.all_reduce(max_and_minus_min, dist.ReduceOp.MAX, group=group)
        if max_and_minus_min[0] > -max_and_minus_min[1] and dist.get_rank() == 0:
            note = f"checkpoint.monitor={self.monitor} goes by rank 0's samples alone: each rank has another value; "
            print(f"note: {note}sync_dist=True in self.log({self.monitor!r}, ...) makes it the mean of all", flush=True)

    def reject_monitor_without_validation(self, module: str) -> None:
        """Raise `ConfigError` if a metric is monitored, although nothing is validated."""
        if self.monitor:
            rule = f"must be null, as {module} has no validation_step that could log a metric"
            raise ConfigError("checkpoint.monitor", self.monitor, rule, "checkpoint.monitor=null")

    def has_other_criterion(self, state: Mapping[str, Any]) -> bool:
        """Return whether another metric or mode chose the best checkpoint of a saved state."""
        criterion = {"monitor": self.monitor, "mode": self.mode}
        return criterion != {key: state.get(key, value) for key, value in criterion.items()}

    def settle_links(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Let last.ckpt and best.ckpt lead where the saved state of this checkpoint says. Called on rank 0.

        If the best checkpoint no longer exists, it is removed from the state.
        """
        best = checkpoint.with_name(state["best_folder"]) if state["best_folder"] else None
        if not on_disk.repair_links(checkpoint, best) and best:
            print(f"warning: the best checkpoint, {best}, is gone; the next validation names a new one", flush=True)
            state.update(best=None, best_folder=None)
        elif best and state["best"] is not None and self.has_other_criterion(state):
            consequence = "with checkpoint.monitor=null it stays the best one"
            if self.monitor:
                consequence = f"the next validation names a new one, by {self.monitor} ({self.mode})"
            note = f"best.ckpt is the best one by {state['monitor']} ({state['mode']}); {consequence}"
            print(f"note: {note}", flush=True)

    def state(self) -> dict[str, Any]:
        """Return plain data for `load_state`."""
        return {"best": self.value, "best_folder": self.folder, "monitor": self.monitor, "mode": self.mode}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`. A value of another metric cannot be compared with, so it is dropped."""
        self.value, self.folder = state["best"], state["best_folder"]
        if self.has_other_criterion(state):
            self.value = None  # best.ckpt stays until a validation names a new best one
        self.confirm()
