"""A run continues with the data that it started with: each checkpoint holds their number, names and sizes."""

from pathlib import Path
from typing import Any

import lightning as L

from hpc.config.errors import ConfigError
from hpc.run import changes

MAX_SHOWN = 5  # differences that a message lists


class SameData(L.Callback):
    """Rejects data that have changed since the checkpoint, unless `resume_allow=[data]` was typed for this resume.

    Accepted data are the run's data from then on, also if it resumes from a checkpoint before the change.

    Attributes:
        before: a description of the data in the checkpoint.
        data: a description of the data now.
        has_changed: whether they differ, on purpose.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.before: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self.has_changed = False

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["data"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rejection, differences = None, []
        _create_validation_loaders(trainer)
        if trainer.is_global_zero:  # one process reads the files
            self.data = data_identity(trainer)
            differences = list_differences(self.before, self.data)
            rejection = self._reject_or_record(differences)
        rejection, self.has_changed = trainer.strategy.broadcast((rejection, bool(differences)))
        if rejection:
            raise ConfigError(*rejection)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        reloads = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if reloads and trainer.is_global_zero and not hasattr(getattr(trainer, "datamodule", None), "fingerprint"):
            self.data = data_identity(trainer)  # each epoch may have more samples than the one before

    def _reject_or_record(self, differences: list[str]) -> tuple[str, None, str, str] | None:
        """Return the parts of a `ConfigError` for changed data, or record the change if it is permitted."""
        accepted = changes.read_recorded_values(self.run_dir, changes.DATA)
        is_accepted = bool(accepted) and not list_differences(accepted[-1], self.data)
        if differences and not is_accepted:
            if changes.DATA not in changes.read_permission(self.run_dir):
                more = f"; {len(differences) - MAX_SHOWN} more" * (len(differences) > MAX_SHOWN)
                shown = "; ".join(differences[:MAX_SHOWN])
                rule = f"A run must continue with the data that it started with; changed are {shown}{more}"
                fix = f"the data as they were, or, if you mean the change, resume={self.run_dir} resume_allow=[data]"
                return "data", None, rule, fix
            print("\n".join(["data changed, as resume_allow=[data] permits:", *differences]), flush=True)
            changes.record_changes(self.run_dir, differences, data=self.data)
        changes.withdraw_permission(self.run_dir)
        return None


def has_changed_data(trainer: Any) -> bool:
    """Return whether the run continues with other data than before, on purpose."""
    return any(isinstance(callback, SameData) and callback.has_changed for callback in trainer.callbacks)


def _create_validation_loaders(trainer: Any) -> None:
    """Create validation loaders now, as Lightning does if the first epoch validates.

    Otherwise it would depend on the epoch at which a run resumes whether its validation data are compared.
    """
    if trainer.val_dataloaders is None and trainer.enable_validation:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


def data_identity(trainer: Any) -> dict[str, Any]:
    """Return plain data for each split: the DataModule's `fingerprint()`, or else the number of samples."""
    if fingerprint := getattr(getattr(trainer, "datamodule", None), "fingerprint", None):
        return fingerprint()
    data: dict[str, Any] = {}
    for split, loop in (("train", trainer.fit_loop), ("val", trainer.fit_loop.epoch_loop.val_loop)):
        combined = loop._combined_loader  # has no length before it is iterated
        loaders = combined.flattened if combined is not None else ()
        for number, dataset in enumerate(getattr(loader, "dataset", None) for loader in loaders):
            if hasattr(dataset, "__len__"):
                data[f"{split}[{number}]" if number else split] = {"samples": len(dataset)}  # type: ignore[arg-type]
    return data


def list_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return lines of the form "split: fact before -> now", for splits that are in both descriptions."""
    return [
        f"{split}: {_difference(fact, old, now[split].get(fact))}"
        for split in before
        if split in now
        for fact, old in before[split].items()
        if now[split].get(fact) != old
    ]


def _difference(fact: str, old: Any, new: Any) -> str:
    if isinstance(old, str) and isinstance(new, str):
        return f"{fact} differ"  # the values are checksums
    if not (isinstance(old, list) and isinstance(new, list)):
        return f"{fact} {old} -> {new}"
    removed = [str(item) for item in old if item not in new]
    added = [str(item) for item in new if item not in old]
    return f"{fact} {', '.join(removed[:MAX_SHOWN]) or '-'} -> {', '.join(added[:MAX_SHOWN]) or '-'}"
