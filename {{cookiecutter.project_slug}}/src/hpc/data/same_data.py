"""A run goes on with the data that it began with: their number, names and sizes are kept in each checkpoint."""

from pathlib import Path
from typing import Any

import lightning as L

from hpc.config.errors import ConfigError
from hpc.run import allowed_changes

SHOWN = 5  # of two long lists, what differs


class SameData(L.Callback):
    """Rejects data that have changed since the checkpoint, unless `resume_allow=[data]` was typed for this resume.

    What was accepted once is the run's data from then on, also for a start from a checkpoint before that.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.before: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self.has_changed = False  # since the checkpoint, and that was meant

    def state_dict(self) -> dict[str, Any]:
        return {"data": self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = state_dict["data"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rejection, lines = None, []
        _make_validation_loaders(trainer)
        if trainer.is_global_zero:  # one process looks at the files
            self.data = describe_data(trainer)
            lines = list_differences(self.before, self.data)
            rejection = self._judge(lines)
        rejection, self.has_changed = trainer.strategy.broadcast((rejection, bool(lines)))
        if rejection:
            raise ConfigError(*rejection)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        reloads = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if reloads and trainer.is_global_zero and not hasattr(getattr(trainer, "datamodule", None), "fingerprint"):
            self.data = describe_data(trainer)  # each epoch may have more than the one before

    def _judge(self, lines: list[str]) -> tuple[str, str, str, str] | None:
        accepted = allowed_changes.recorded_facts(self.run_dir, allowed_changes.DATA)
        is_accepted = bool(accepted) and not list_differences(accepted[-1], self.data)
        if lines and not is_accepted:
            if allowed_changes.DATA not in allowed_changes.read_grant(self.run_dir):
                more = f"; {len(lines) - SHOWN} more" * (len(lines) > SHOWN)
                rule = f"a run must go on with the data that it began with; {'; '.join(lines[:SHOWN])}{more}"
                fix = f"the data as they were, or, if you mean the change, resume={self.run_dir} resume_allow=[data]"
                return "data", "changed", rule, fix
            print("\n".join(["data changed, as resume_allow=[data] permits:", *lines]), flush=True)
            allowed_changes.record_changes(self.run_dir, lines, data=self.data)
        allowed_changes.withdraw(self.run_dir)
        return None


def has_changed_data(trainer: Any) -> bool:
    """Does the run go on with other data, as somebody means it to?"""
    return any(isinstance(callback, SameData) and callback.has_changed for callback in trainer.callbacks)


def _make_validation_loaders(trainer: Any) -> None:
    """As Lightning does it where the first epoch is one that validates: whether they are known must not depend on where
    a run goes on.
    """
    if trainer.val_dataloaders is None:
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        trainer.training = True


def describe_data(trainer: Any) -> dict[str, Any]:
    """Plain data for each split: what `fingerprint()` of the DataModule says, else how many samples there are."""
    if hasattr(trainer.datamodule, "fingerprint"):
        return trainer.datamodule.fingerprint()
    found: dict[str, Any] = {}
    for split, loop in (("train", trainer.fit_loop), ("val", trainer.fit_loop.epoch_loop.val_loop)):
        combined = loop._combined_loader  # has no length before it is iterated
        loaders = combined.flattened if combined is not None else ()
        for number, dataset in enumerate(getattr(loader, "dataset", None) for loader in loaders):
            if hasattr(dataset, "__len__"):
                found[f"{split}[{number}]" if number else split] = {"samples": len(dataset)}  # type: ignore[arg-type]
    return found


def list_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`split: fact was -> is`, of the splits that both know."""
    return [
        f"{split}: {_difference(fact, old, now[split].get(fact))}"
        for split in before
        if split in now
        for fact, old in before[split].items()
        if now[split].get(fact) != old
    ]


def _difference(fact: str, old: Any, new: Any) -> str:
    if isinstance(old, str) and isinstance(new, str):
        return f"{fact} differ"  # a checksum tells nobody more
    if not (isinstance(old, list) and isinstance(new, list)):
        return f"{fact} {old} -> {new}"
    gone, come = ([str(one) for one in some if one not in other] for some, other in ((old, new), (new, old)))
    return f"{fact} {', '.join(gone[:SHOWN]) or '-'} -> {', '.join(come[:SHOWN]) or '-'}"
