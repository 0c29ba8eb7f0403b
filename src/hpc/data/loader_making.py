"""Loaders of a resumed run are made from what they were made from at first.

A hook that makes loaders may count its calls, take the next file of a list, or draw a part of the data. What it draws
follows from (seed, split, epoch). Attributes are recorded as they were just before: a resume sets these, makes the
loaders, and then sets all attributes to what they were when the run was saved.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import lightning as L
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hpc.data.rank_steps import run_seed
from hpc.state import attributes, randomness
from hpc.state.attributes import ChangedAttributes, InitialAttributes, Place
from hpc.state.batch_effects import OF_ALL, AttributeEffects

# Names in Lightning's loops.
LAST_EPOCH = {"train": "_last_train_dl_reload_epoch", "val": "_last_val_dl_reload_epoch"}
IS_DUE = {"train": "_should_reload_train_dl", "val": "_should_reload_val_dl"}
MAX_ENTRIES = 1_000_000  # of a container, array or tensor that is copied before loaders are made
Notes = dict[str, dict[str, Any]]  # of each split: the epoch, and owner, name and plain form of attributes


class RecordsInitialValues(Protocol):
    """The attributes as the constructor and `setup` gave them, see `InitialValues`."""

    def given(self, trainer: L.Trainer, module: L.LightningModule) -> InitialAttributes: ...

    def record_made(
        self, trainer: L.Trainer, module: L.LightningModule, *, before: InitialAttributes, noted: set[Place]
    ) -> set[Place]: ...


class LoaderMaking:
    """Records what loaders are made from; on resume makes them from what was recorded.

    Attributes:
        notes: of the loaders that exist.
        again: the result of `state` of an earlier attempt, for loaders that are still to be made. A note with `is_new`
            has the attributes for loaders that the earlier attempt has not made.
        changed: places of attributes that the last making of training loaders has changed.
    """

    def __init__(self, trainer: L.Trainer, initial: RecordsInitialValues) -> None:
        self.trainer, self.initial = trainer, initial
        self.loops = {"train": trainer.fit_loop, "val": trainer.fit_loop.epoch_loop.val_loop}
        self.notes: Notes = {}
        self.again: Notes = {}
        self.changed: set[Place] = set()
        self._effects = AttributeEffects(trainer, max_entries=MAX_ENTRIES)
        for split, loop in self.loops.items():
            # Lightning has no hook for this. It calls `setup_data` whenever new loaders may be needed.
            loop.setup_data = partial(self._make, split, loop, loop.setup_data)  # type: ignore[method-assign]
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
            split: note | {"epoch": getattr(self.loops[split], LAST_EPOCH[split])} for split, note in self.notes.items()
        }

    def _make(self, split: str, loop: Any, set_up: Callable[[], None]) -> None:
        """Call a loop's `setup_data`, from what was noted or with a note of what changes."""
        if loop._combined_loader is not None and not getattr(loop, IS_DUE[split]):
            return set_up()
        note, effects, loaders = self._take_note(split), self._effects, loop._combined_loader
        trainer, module = self.trainer, self.trainer.lightning_module
        given = self.initial.given(trainer, module)
        effects.choose()
        present = effects.present(note["changed"]) if note else []
        if note:
            effects.restore(note["changed"])
        is_again = note is not None and not note.get("is_new")
        before = attributes.record_initial(trainer, module)
        noted = [] if is_again else _small(attributes.find_changed(trainer, module, initial=given))
        effects.capture()
        with randomness.drawn_apart(run_seed(), split, note["epoch"] if note else trainer.current_epoch):
            set_up()
        if loop._combined_loader is loaders:
            return
        self.notes[split] = note if note and is_again else {"changed": [*noted, *effects.changed()]}
        places = {(owner, name) for owner, name, _ in self.notes[split]["changed"]}
        made = self.initial.record_made(trainer, module, before=before, noted=places)
        if split == "train":
            self.changed = made
        if note:
            setattr(loop, LAST_EPOCH[split], note["epoch"])
        if note and split == "val":  # those of training are set when it starts
            effects.restore(present)

    def _take_note(self, split: str) -> dict[str, Any] | None:
        """Return the note of loaders that are to be made again; None for new ones."""
        # A schedule may ask for the length of training before the epoch is known at which it resumes.
        if split not in self.again or self.trainer.current_epoch < self.again[split]["epoch"]:
            return None
        return self.again.pop(split)


def _small(changed: ChangedAttributes) -> list[tuple[str, str, Any]]:
    """Return the attributes that loaders may be made of, can be saved, and are not large."""
    small = []
    for owner, name, form in changed:
        leaves = tree_leaves(form)
        num_entries = len(leaves) + sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
        if owner.startswith(OF_ALL) and num_entries <= MAX_ENTRIES and not attributes.is_unsaved(form):
            small.append((owner, name, form))
    return small
