"""Attributes and settings before training changes them: only what differs from these is saved."""

from typing import Any

import lightning as L

from hpc.state import attributes, trainer_settings
from hpc.state.attributes import ChangedAttributes, InitialAttributes, Place
from hpc.state.holder_fields import DATASET
from hpc.state.holders import COLLATE
from hpc.state.plain_forms import NOT_KEPT


class InitialValues:
    """Fingerprints of attributes as the constructor and `setup` have left them, before any loader or hook of the fit.

    Attributes:
        settings: of the Trainer and the optimizers, as training begins.
        restored: places of attributes that a resumed run has set before training began.
        named_unsaved: names of attributes that a checkpoint cannot hold, and of which a warning says so.
    """

    def __init__(self) -> None:
        self.settings: trainer_settings.InitialSettings = {}
        self.restored: set[Place] = set()
        self.named_unsaved: set[str] = set()
        self._given: InitialAttributes | None = None
        self._made: InitialAttributes = {}  # what the making of loaders has changed, as it was just after it
        self._at_start: InitialAttributes | None = None  # what hooks have changed until training began

    def given(self, trainer: L.Trainer, module: L.LightningModule) -> InitialAttributes:
        """Return what the constructor and `setup` gave; it is recorded at the first call."""
        if self._given is None:
            self._given = attributes.record_initial(trainer, module)
        return self._given

    def record_made(self, trainer: L.Trainer, module: L.LightningModule, *, before: InitialAttributes) -> set[Place]:
        """Record what the making of loaders has changed: a resumed run makes it again. Return the places."""
        now = attributes.record_initial(trainer, module)
        of_loaders = (DATASET, COLLATE)
        made = {
            place: now[place] for place in now if place[0].startswith(of_loaders) or before.get(place) != now[place]
        }
        self._made |= made
        self._add_owners(trainer, module, now)
        return set(made)

    def begin_training(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Record once, after the module's own `on_train_start`, what hooks have set: they set it at each start."""
        if self._at_start is not None:
            return
        self._add_owners(trainer, module, attributes.record_initial(trainer, module))
        found = attributes.changes(trainer, module, initial=self.given(trainer, module))
        self._at_start = {
            place: fingerprint
            for place, fingerprint, form in found
            if attributes.is_unsaved(form) or place not in self.restored
        }
        self.settings = trainer_settings.record_initial(trainer)

    def changed(self, trainer: L.Trainer, module: L.LightningModule) -> tuple[ChangedAttributes, list[list[str]]]:
        """Return what a checkpoint must hold or name, and which of it is still as hooks had set it at the start."""
        changed: list[tuple[str, str, Any]] = []
        of_start = []
        for place, fingerprint, form in attributes.changes(trainer, module, initial=self.given(trainer, module)):
            is_of_start = (self._at_start or {}).get(place) == fingerprint
            is_made_again = self._made.get(place) == fingerprint
            if is_made_again or (is_of_start and isinstance(form, str) and form == NOT_KEPT):
                continue
            changed.append((*place, form))
            if is_of_start:
                of_start.append([*place])
        return changed, of_start

    def _add_owners(self, trainer: L.Trainer, module: L.LightningModule, now: InitialAttributes) -> None:
        """Count objects that exist now among those that a resumed run makes, too."""
        given = self.given(trainer, module)
        given |= {place: True for place in now if place[1] == attributes.EXISTS}
