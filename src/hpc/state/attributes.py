"""State in attributes of a module, its data and its callbacks: changes are restored, or a warning is printed.

A temperature that is set as an epoch begins, outputs that are gathered until it ends, a layer that is no longer frozen:
neither torch nor Lightning saves these. Of all attributes only those are saved that have changed since training began:
the others are what the config has built, and a resumed run may build them otherwise on purpose. Of a changed attribute
that cannot be saved, the resumed run warns.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hpc.state import checksums, holder_fields, holders, plain_forms, restorable, structure
from hpc.state.holder_fields import CONTENT, DATASET
from hpc.state.holders import COLLATE, DATA

Place = tuple[str, str]  # an owner's name and an attribute's
ChangedAttributes = Sequence[tuple[str, str, Any]]  # owner, name, plain form
InitialAttributes = dict[Place, Any]  # a fingerprint by place
ITSELF, EXISTS = "itself", "exists"  # in place of an attribute's name
WARNINGS = {
    plain_forms.NOT_KEPT: "a checkpoint cannot hold these attributes, so they start anew in a resumed run",
    plain_forms.NOT_SEEN: "these attributes start anew in a resumed run, and it cannot be detected whether training "
    "changes them",
}
STRUCTURE_WARNING = "training had changed these layers and hooks, which a checkpoint does not hold, so they start anew"


def record_initial(
    trainer: L.Trainer, module: L.LightningModule, *, before: InitialAttributes | None = None
) -> InitialAttributes:
    """Return fingerprints of all attributes before training begins.

    Args:
        before: fingerprints from before the fit hooks ran. A tensor, array or network made since counts as changed,
            because making it again would give other values.
    """
    names = holders.HolderNames(trainer, module)
    initial: InitialAttributes = {(owner, EXISTS): True for owner in names.holders}
    for place, value, fingerprint in _fingerprints(names):
        is_data = place[0].startswith((DATA, DATASET, COLLATE))
        if before is None or is_data or before.get(place) == fingerprint or not _holds_arrays(value):
            initial[place] = fingerprint
    return initial


def find_changed(trainer: L.Trainer, module: L.LightningModule, *, initial: InitialAttributes) -> ChangedAttributes:
    """Return owner, name and plain form of attributes that are new or changed since `record_initial`, on the host.

    `plain_forms.NOT_KEPT` stands for a value that cannot be saved: it has no plain form, holds an object that training
    has made, or workers hold copies.
    `plain_forms.NOT_SEEN` for one whose change cannot be detected. A dataset that was made since then, as loaders were
    reloaded, counts as unchanged.
    """
    changed, new_owners, names = [], set(), holders.HolderNames(trainer, module)
    made = {owner for owner in names.holders if (owner, EXISTS) not in initial and "/" in owner}
    for (owner, name), value, fingerprint in _fingerprints(names):
        if owner in made:  # what holds it is named
            continue
        if fingerprint == initial.get((owner, name)) and fingerprint != checksums.UNREADABLE:
            continue
        if name == ITSELF:
            new_owners.add(owner)
        elif holders.root_owner(owner) not in new_owners and names.get(value) != holders.VIEW:
            is_kept = not owner.startswith(DATASET)
            form = plain_forms.NOT_KEPT
            if is_kept:
                form = plain_forms.to_plain_on_host(value, _NamesFromBefore(names, made))
            changed.append((owner, name, plain_forms.NOT_SEEN if fingerprint == checksums.UNREADABLE else form))
    return changed


def buffers_as_changed(buffers: Mapping[str, Tensor]) -> ChangedAttributes:
    """Return this rank's own buffers as `find_changed` would, to be restored in place of the checkpoint's."""
    changed = []
    for full_name, buffer in buffers.items():
        part, _, name = full_name.rpartition(".")
        changed.append((f"module {part}", name, plain_forms.to_plain_on_host(buffer)))
    return changed


def restore(
    trainer: L.Trainer, module: L.LightningModule, *, changed: ChangedAttributes, is_other_rank: bool = False
) -> None:
    """Set the result of `find_changed` as far as this run has such owners, and print what was and was not restored.

    Args:
        is_other_rank: all ranks take rank 0's, as their number has changed.
    """
    owners, restored = holders.find_holders(trainer, module), dict[str, None]()
    lost: dict[str, dict[str, None]] = {form: {} for form in WARNINGS}
    differences: list[str] = []
    for owner, name, form in changed:
        shown = holders.shown_name(owner, name)
        if holders.root_owner(owner) not in owners:
            continue
        if name in (structure.LAYERS, structure.HOOKS):
            if owner in owners:
                differences += structure.describe_differences(owner, owners[owner], name=name, before=form)
        elif form in (plain_forms.NOT_KEPT, plain_forms.NOT_SEEN):
            lost[form][shown] = None
        elif _set_field(trainer, owners, (owner, name), form):
            restored[shown] = None
        else:
            lost[plain_forms.NOT_KEPT][shown] = None
    if trainer.is_global_zero:
        origin = "the checkpoint, those of rank 0 on all ranks" if is_other_rank else "the checkpoint"
        kept = [name for name in restored if name not in lost[plain_forms.NOT_KEPT]]
        _print_restored(kept, lost, differences, origin=origin)


def _print_restored(
    restored: list[str], lost: Mapping[str, Mapping[str, None]], differences: list[str], *, origin: str
) -> None:
    if restored:
        print(f"train: these attributes are restored from {origin}: {', '.join(restored)}", flush=True)
    for form, names in lost.items():
        _print_warning(form, names)
    if differences:
        fix = "Try: on_train_start of your module that changes them by current_epoch, also in a resumed run"
        print(f"warning: {STRUCTURE_WARNING}: {', '.join(differences)}. {fix}", flush=True)


def print_unsaved(changed: ChangedAttributes, named: set[str]) -> None:
    """Print what training has changed and this checkpoint cannot hold, each name once.

    Args:
        named: names that were printed before; new ones are added.
    """
    for form in WARNINGS:
        names = {
            holders.shown_name(owner, name): None
            for owner, name, value in changed
            if isinstance(value, str) and value == form
        }
        _print_warning(form, [name for name in names if name not in named])
        named.update(names)


def _print_warning(form: str, names: Collection[str]) -> None:
    if names:
        fix = "Try: a state_dict() of your module or data that returns them"
        print(f"warning: {WARNINGS[form]}: {', '.join(names)}. {fix}", flush=True)


def restore_data(
    trainer: L.Trainer,
    module: L.LightningModule,
    *,
    changed: ChangedAttributes,
    owners: tuple[str, ...] = (DATA, COLLATE),
) -> InitialAttributes:
    """Set attributes of the DataModule and of objects that collate samples, silently: `restore` comes later.

    Args:
        owners: beginnings of their names.

    Returns:
        The fingerprints before, for `record_initial`.
    """
    names = holders.HolderNames(trainer, module)
    before = {place: fingerprint for place, _, fingerprint in _fingerprints(names, owners)}
    of_data = [entry for entry in changed if entry[0].startswith(owners)]
    for owner, name, form in of_data:
        has_owner = holders.root_owner(owner) in names.holders
        if has_owner and form not in (plain_forms.NOT_KEPT, plain_forms.NOT_SEEN):
            _set_field(trainer, names.holders, (owner, name), form)
    return {(owner, name): before[owner, name] for owner, name, _ in of_data if (owner, name) in before}


def _set_field(trainer: L.Trainer, owners: dict[str, Any], place: Place, form: Any) -> bool:
    """Set one attribute, and return whether it is set."""
    (owner_name, name), device = place, trainer.strategy.root_device
    try:
        owner = owners[owner_name]
        makers = {"object": owners.__getitem__, plain_forms.ON_DEVICE: lambda tensor: tensor.to(device)}
        if not holder_fields.may_have_changed(owner_name, owner, name):
            return False
        if isinstance(owner, restorable.RECORDS) and restorable.is_given(*_holder_of(owner_name, owners)):
            present = owner if name == CONTENT else getattr(owner, name, None)
            if not restorable.has_only_given_texts(plain_forms.from_plain(form, makers), present):
                return False
        if name == CONTENT:
            holder_fields.fill_content(owner, plain_forms.from_plain(form, makers))
        else:
            plain_forms.set_attribute(owner, name, form=form, find=owners.__getitem__, device=device)
    except Exception:  # this run lacks a part of the value, or other people's code raises anything
        return False
    return True


def _holder_of(owner_name: str, owners: dict[str, Any]) -> tuple[Any, str]:
    """Return the object that holds another one, and in which attribute."""
    parent, _, path = owner_name.rpartition("/")
    return owners.get(parent), re.split(r"[\[ ]", path)[0]


class _NamesFromBefore:
    """The names of objects that exist in a resumed run, too. Raises `TypeError` for one that training has made."""

    def __init__(self, names: holders.HolderNames, made: set[str]) -> None:
        self.names, self.made = names, made

    def get(self, value: Any) -> str | None:
        if (name := self.names.get(value)) in self.made:
            raise TypeError(f"training has made {name}")
        return name


def _fingerprints(names: holders.HolderNames, owners: tuple[str, ...] = ("",)) -> Iterator[tuple[Place, Any, Any]]:
    """Yield each attribute with its place and its fingerprint; of datasets also their identity, below ITSELF."""
    for owner_name, owner in names.holders.items():
        if not owner_name.startswith(owners):
            continue
        if owner_name.startswith(DATASET) and "/" not in owner_name:
            yield (owner_name, ITSELF), owner, id(owner)
        for name, value in holder_fields.unsaved_fields(owner_name, owner):
            yield (owner_name, name), value, checksums.fingerprint(value, names)


def _holds_arrays(value: Any) -> bool:
    return any(isinstance(leaf, Tensor | np.ndarray) for leaf in tree_leaves(value))
