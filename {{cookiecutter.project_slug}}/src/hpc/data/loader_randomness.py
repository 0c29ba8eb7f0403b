"""Loaders of a resumed run are created with the random numbers with which they were created at first.

So a part of the data that is drawn in `val_dataloader()`, for example, stays the same. Without this it would change: a
resumed run creates its loaders at other moments, as it makes no sanity check, and draws other numbers before.
"""

from collections.abc import Callable
from typing import Any

import lightning as L

from hpc.state import plain_forms, randomness

LAST_RELOAD_EPOCH = {"train": "_last_train_dl_reload_epoch", "val": "_last_val_dl_reload_epoch"}  # of Lightning's loops
Notes = dict[str, dict[str, Any]]  # of each split, as plain data


class LoaderRandomness:
    """Records the RNG state before loaders are created; on resume creates them from the recorded state.

    Attributes:
        notes: of the loaders that exist.
        again: the result of `state` of an earlier attempt, for loaders that are still to be created.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.loops = {"train": trainer.fit_loop, "val": trainer.fit_loop.epoch_loop.val_loop}
        self.notes: Notes = {}
        self.again: Notes = {}
        for split, loop in self.loops.items():
            # Lightning has no hook for this. It calls `setup_data` whenever new loaders may be needed.
            loop.setup_data = self._with_notes(split, loop, loop.setup_data)  # type: ignore[method-assign]
        self._prevent_reload_of_finished_validation(self.loops["val"])

    def _prevent_reload_of_finished_validation(self, loop: Any) -> None:
        """Create no new loaders for a validation that Lightning counts as done, right after which a run resumes."""
        count_as_done = loop.increment_progress_to_evaluation_end

        def count_without_reload() -> None:
            if loop._combined_loader is None:
                return count_as_done()
            last, loop._last_val_dl_reload_epoch = loop._last_val_dl_reload_epoch, self.trainer.current_epoch
            count_as_done()
            loop._last_val_dl_reload_epoch = last

        loop.increment_progress_to_evaluation_end = count_without_reload

    def state(self) -> Notes:
        """Return the notes of the loaders that exist, with the epoch of each."""
        return {
            split: note | {"epoch": getattr(self.loops[split], LAST_RELOAD_EPOCH[split])}
            for split, note in self.notes.items()
        }

    def _with_notes(self, split: str, loop: Any, set_up: Callable[[], None]) -> Callable[[], None]:
        """Return a loop's `setup_data` that restores noted random numbers first, and notes those of new loaders."""

        def set_up_with_notes() -> None:
            before, loaders = self._capture(), loop._combined_loader
            # A schedule may ask for the length of training before the epoch is known at which it resumes.
            is_due = split in self.again and self.trainer.current_epoch >= self.again[split]["epoch"]
            again = self.again.pop(split) if is_due else None
            if again:
                self._restore(again)
            set_up()
            is_new = loop._combined_loader is not loaders
            if is_new:  # "apart": during a sanity check, after which Lightning restores the random numbers
                self.notes[split] = again or before | {"apart": self.trainer.sanity_checking}
            if again:
                setattr(loop, LAST_RELOAD_EPOCH[split], again["epoch"])
                self._restore(before if again["apart"] or not is_new else {"own": before["own"]})

        return set_up_with_notes

    def _capture(self) -> dict[str, Any]:
        """Return the random state of this process, and that of generators among the DataModule's attributes."""
        data: Any = getattr(self.trainer, "datamodule", None)
        attributes = plain_forms.attributes_with_plain_form(data) if data is not None else {}
        generators = {
            name: plain_forms.to_plain(value) for name, value in attributes.items() if plain_forms.is_generator(value)
        }
        return {"random": randomness.plain_state(), "own": generators}

    def _restore(self, captured: dict[str, Any]) -> None:
        if "random" in captured:
            randomness.restore(captured["random"])
        data: Any = getattr(self.trainer, "datamodule", None)
        for name, form in captured["own"].items():
            if plain_forms.is_generator(getattr(data, name, None)):
                plain_forms.set_attribute(data, name, form=form)
