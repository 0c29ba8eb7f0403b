"""Loaders of a run that goes on are made with the random numbers that they were made with at first.

A part of the data that is drawn in `val_dataloader()`, say, stays the same one. A run that goes on makes its loaders at
other moments: it makes no sanity check, and draws other numbers before.
"""

from collections.abc import Callable
from typing import Any

import lightning as L

from hpc.state import plain_forms, randomness

LAST = {"train": "_last_train_dl_reload_epoch", "val": "_last_val_dl_reload_epoch"}  # as Lightning's loops note it
Notes = dict[str, dict[str, Any]]  # of each split, as plain data


class LoaderRandomness:
    """Notes what loaders are made with, from now on, and lets the next ones be made with what was noted."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.loops = {"train": trainer.fit_loop, "val": trainer.fit_loop.epoch_loop.val_loop}
        self.notes: Notes = {}
        self.again: Notes = {}
        for split, loop in self.loops.items():
            # Lightning has no hook there. It asks this whenever new loaders may be needed.
            loop.setup_data = self._noting(split, loop, loop.setup_data)  # type: ignore[method-assign]
        self._pass_over(self.loops["val"])

    def _pass_over(self, loop: Any) -> None:
        """Where a run goes on right after a validation Lightning passes over that one: not with new loaders."""
        pass_over = loop.increment_progress_to_evaluation_end

        def passed_over() -> None:
            if loop._combined_loader is None:
                return pass_over()
            last, loop._last_val_dl_reload_epoch = loop._last_val_dl_reload_epoch, self.trainer.current_epoch
            pass_over()
            loop._last_val_dl_reload_epoch = last

        loop.increment_progress_to_evaluation_end = passed_over

    def state(self) -> Notes:
        """Of the loaders that are there."""
        return {split: note | {"epoch": getattr(self.loops[split], LAST[split])} for split, note in self.notes.items()}

    def _noting(self, split: str, loop: Any, set_up: Callable[[], None]) -> Callable[[], None]:
        def set_up_noted() -> None:
            before, loaders = self._drawn(), loop._combined_loader
            # A schedule may ask for the length of training before the epoch is known that goes on.
            due = split in self.again and self.trainer.current_epoch >= self.again[split]["epoch"]
            again = self.again.pop(split) if due else None
            if again:
                self._draw(again)
            set_up()
            made = loop._combined_loader is not loaders
            if made:  # Lightning puts random numbers back after a sanity check
                self.notes[split] = again or before | {"apart": self.trainer.sanity_checking}
            if again:
                setattr(loop, LAST[split], again["epoch"])
                self._draw(before if again["apart"] or not made else {"own": before["own"]})

        return set_up_noted

    def _drawn(self) -> dict[str, Any]:
        """The random state, and that of generators that a DataModule has."""
        data: Any = getattr(self.trainer, "datamodule", None)
        own = plain_forms.data_attributes(data) if data is not None else {}
        generators = {
            name: plain_forms.to_plain(value) for name, value in own.items() if plain_forms.is_generator(value)
        }
        return {"random": randomness.plain_state(), "own": generators}

    def _draw(self, drawn: dict[str, Any]) -> None:
        if "random" in drawn:
            randomness.restore(drawn["random"])
        for name, form in drawn["own"].items():
            plain_forms.set_attribute(self.trainer.datamodule, name, form=form)  # type: ignore[attr-defined]
