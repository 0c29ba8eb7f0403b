"""Attributes and settings before training changes them: only what differs from these is saved."""

from typing import Any

import lightning as L
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from hpc.state import attributes, checksums, holders, trainer_settings
from hpc.state.attributes import ChangedAttributes, InitialAttributes, Place
from hpc.state.holder_fields import DATASET
from hpc.state.holders import COLLATE
from hpc.state.plain_forms import KIND, NOT_KEPT

MAX_ENTRIES = 10_000  # numbers and texts in a value that is small: the state of a generator has some thousands


class InitialValues:
    """Fingerprints of attributes as the constructor and `setup` have left them, before any loader or hook of the fit.

    Attributes:
        settings: of the Trainer and the optimizers, as training begins.
        named_unsaved: names of attributes that a checkpoint cannot hold, and of which a warning says so.
    """

    def __init__(self) -> None:
        self.settings: trainer_settings.InitialSettings = {}
        self.named_unsaved: set[str] = set()
        self._given: InitialAttributes | None = None
        self._made: InitialAttributes = {}  # what the making of loaders has changed, as it was just after it
        self._set_at_start: InitialAttributes = {}  # what hooks have set until training began, and a checkpoint holds
        self._made_at_start: InitialAttributes = {}  # and what none can hold: hooks make it at each start
        self._has_begun = False

    def given(self, trainer: L.Trainer, module: L.LightningModule) -> InitialAttributes:
        """Return what the constructor and `setup` gave; it is recorded at the first call."""
        if self._given is None:
            for holder in (module, getattr(trainer, "datamodule", None)):
                getattr(holder, "hparams", None)  # Lightning makes an empty dict of it when it is read first
            self._given = attributes.record_initial(trainer, module)
        return self._given

    def record_made(
        self, trainer: L.Trainer, module: L.LightningModule, *, before: InitialAttributes, noted: set[Place]
    ) -> set[Place]:
        """Record what the making of loaders has changed. Return the places.

        A resumed run makes it again, so nobody need save what is large, or name what cannot be saved. It does so only
        from the same value: the one that was given, or one that is noted.

        Args:
            before: just before the making.
            noted: places whose value before the making a checkpoint has.
        """
        now, given = attributes.record_initial(trainer, module), self.given(trainer, module)
        made = {place for place in now if place[0].startswith((DATASET, COLLATE)) or before.get(place) != now[place]}
        owners = holders.find_holders(trainer, module)
        for owner, name in made:
            is_from_the_same = before.get((owner, name)) == given.get((owner, name)) or (owner, name) in noted
            if is_from_the_same or owner.startswith(DATASET) or _is_loader(getattr(owners.get(owner), name, None)):
                self._made[owner, name] = now[owner, name]
        self._count_as_given(trainer, module, now)
        return made

    def begin_training(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Record once, after the module's own `on_train_start`, what hooks have set."""
        if self._has_begun:
            return
        self._has_begun = True
        self._count_as_given(trainer, module, attributes.record_initial(trainer, module))
        for place, fingerprint, form in attributes.changes(trainer, module, initial=self.given(trainer, module)):
            found = self._made_at_start if attributes.is_unsaved(form) else self._set_at_start
            found[place] = fingerprint
        self.settings = trainer_settings.record_initial(trainer)

    def take_over(
        self, trainer: L.Trainer, module: L.LightningModule, *, changed: ChangedAttributes, of_start: set[Place]
    ) -> None:
        """Count what was restored as in the run that has saved it.

        Args:
            changed, of_start: what `changed` returned there.
        """
        now, saved = attributes.record_initial(trainer, module), {(owner, name) for owner, name, _ in changed}
        self._set_at_start = {place: now[place] for place in of_start if place in now}
        self._made |= {place: now[place] for place in self._made if place in now and place not in saved}

    def changed(self, trainer: L.Trainer, module: L.LightningModule) -> tuple[ChangedAttributes, list[list[str]]]:
        """Return what a checkpoint must hold or name, and which of it is still as hooks had set it at the start."""
        changed: list[tuple[str, str, Any]] = []
        of_start: list[list[str]] = []
        for place, fingerprint, form in attributes.changes(trainer, module, initial=self.given(trainer, module)):
            is_iterator = fingerprint == checksums.UNREADABLE and not place[0].startswith(DATASET)
            is_made_again = self._made.get(place) == fingerprint and not _is_small(form) and not is_iterator
            if is_made_again or (_is_not_kept(form) and self._made_at_start.get(place) == fingerprint):
                continue
            changed.append((*place, form))
            if self._set_at_start.get(place) == fingerprint:
                of_start.append([*place])
        return sorted(changed, key=lambda entry: entry[:2]), sorted(of_start)

    def _count_as_given(self, trainer: L.Trainer, module: L.LightningModule, now: InitialAttributes) -> None:
        """Count objects that exist now among those that a resumed run makes, too."""
        given = self.given(trainer, module)
        given |= {place: True for place in now if place[1] == attributes.EXISTS}


def without_computed(
    trainer: L.Trainer,
    module: L.LightningModule,
    *,
    changed: ChangedAttributes,
    of_start: set[Place],
    is_same_plan: bool,
) -> ChangedAttributes:
    """Return all of `changed` but what hooks compute at each start of training, from its place, length and layout.

    These are texts, such as a folder or a host, and numbers if that length or layout is another one.

    Args:
        of_start: what hooks had set when training began.
        is_same_plan: whether training has the same length and layout as when it was saved.
    """
    computed = []
    for owner, name, form in changed:
        has_text = any(isinstance(leaf, str) for leaf in tree_leaves(form))
        if (owner, name) in of_start and _is_simple(form) and (has_text or not is_same_plan):
            computed.append((owner, name, form))
    if trainer.is_global_zero and (names := attributes.differing_names(trainer, module, changed=computed)):
        rule = "these attributes are as hooks set them when training starts, not as in the checkpoint"
        print(f"note: {rule}: {', '.join(names)}", flush=True)
    left_out = {(owner, name) for owner, name, _ in computed}
    return [entry for entry in changed if (entry[0], entry[1]) not in left_out]


def _is_simple(form: Any) -> bool:
    """Return whether a value is a number or a text, or lists and dicts of these."""
    if isinstance(form, dict):
        return KIND not in form and all(map(_is_simple, form.values()))
    if isinstance(form, list | tuple):
        return all(map(_is_simple, form))
    return type(form) in (bool, int, float, str, type(None))


def _is_small(form: Any) -> bool:
    """Return whether a value can be saved, and is so small that it need not be made again."""
    leaves = tree_leaves(form)
    num_entries = len(leaves) + sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
    return num_entries <= MAX_ENTRIES and not attributes.is_unsaved(form)


def _is_loader(value: Any) -> bool:
    """Return whether a value is a loader, or several of them: new ones are made from nothing."""
    leaves = tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, DataLoader) for leaf in leaves)


def _is_not_kept(form: Any) -> bool:
    return isinstance(form, str) and form == NOT_KEPT
