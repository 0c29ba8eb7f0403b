"""State in attributes of a module, its data and its callbacks: changes are restored, or named at the first save.

A temperature that is set as an epoch begins, outputs that are gathered until it ends, a layer that is no longer frozen:
neither torch nor Lightning saves these. Of all attributes only those are saved that are not as the constructor and
`setup` gave them: the others are what the config has built, and a resumed run may build them otherwise on purpose.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import lightning as L

from hpc.state import checksums, holder_fields, holders, plain_forms, restorable
from hpc.state.holder_fields import CONTENT, DATASET

Place = tuple[str, str]  # an owner's name and an attribute's
ChangedAttributes = Sequence[tuple[str, str, Any]]  # owner, name, plain form
InitialAttributes = dict[Place, Any]  # a fingerprint by place
EXISTS = "exists"  # in place of an attribute's name
WARNINGS = {
    plain_forms.NOT_KEPT: "a checkpoint cannot hold these attributes, so they start anew in a resumed run",
    plain_forms.NOT_SEEN: "these attributes start anew in a resumed run, and it cannot be detected whether training "
    "changes them",
}


def record_initial(trainer: L.Trainer, module: L.LightningModule) -> InitialAttributes:
    """Return fingerprints of all attributes, and which objects exist."""
    names = holders.HolderNames(trainer, module)
    initial: InitialAttributes = {(owner, EXISTS): True for owner in names.holders}
    return initial | {place: fingerprint for place, _, fingerprint in _fingerprints(names)}


def changes(
    trainer: L.Trainer, module: L.LightningModule, *, initial: InitialAttributes
) -> Iterator[tuple[Place, Any, Any]]:
    """Yield place, fingerprint and plain form of attributes that are new or changed; tensors of a form on the host.

    `plain_forms.NOT_KEPT` stands for a value that cannot be saved: it has no plain form, holds an object that training
    has made, or workers hold copies.
    `plain_forms.NOT_SEEN` for one whose change cannot be detected.
    """
    names = holders.HolderNames(trainer, module)
    made = {owner for owner in names.holders if (owner, EXISTS) not in initial and "/" in owner}
    for (owner, name), value, fingerprint in _fingerprints(names):
        if owner in made:  # what holds it is named
            continue
        if fingerprint == initial.get((owner, name)) and fingerprint != checksums.UNREADABLE:
            continue
        if names.get(value) == holders.VIEW:
            continue
        form = plain_forms.NOT_SEEN if fingerprint == checksums.UNREADABLE else plain_forms.NOT_KEPT
        if form == plain_forms.NOT_KEPT and not owner.startswith(DATASET) and name not in holder_fields.STRUCTURE:
            form = plain_forms.to_plain_on_host(value, _NamesFromBefore(names, made))
        yield (owner, name), fingerprint, form


def find_changed(trainer: L.Trainer, module: L.LightningModule, *, initial: InitialAttributes) -> ChangedAttributes:
    """Return owner, name and plain form of what `changes` yields."""
    return [(*place, form) for place, _, form in changes(trainer, module, initial=initial)]


def is_unsaved(form: Any) -> bool:
    """Return whether a form stands for a value that a checkpoint cannot hold."""
    return isinstance(form, str) and form in WARNINGS


def restore(
    trainer: L.Trainer, module: L.LightningModule, *, changed: ChangedAttributes, is_other_rank: bool = False
) -> None:
    """Set the result of `find_changed` as far as this run has such owners, and print what was and was not restored.

    Args:
        is_other_rank: all ranks take rank 0's, as their number has changed.
    """
    owners = holders.find_holders(trainer, module)
    shown: dict[str, dict[str, None]] = {form: {} for form in ("restored", *WARNINGS)}
    for owner, name, form in changed:
        if holders.root_owner(owner) in owners:
            is_set = not is_unsaved(form) and _set_field(trainer, owners, (owner, name), form)
            kind = "restored" if is_set else form if is_unsaved(form) else plain_forms.NOT_KEPT
            shown[kind][shown_name(owner, name)] = None
    if trainer.is_global_zero:
        origin = "the checkpoint, those of rank 0 on all ranks" if is_other_rank else "the checkpoint"
        restored = [name for name in shown.pop("restored") if name not in shown[plain_forms.NOT_KEPT]]
        if restored:
            print(f"train: these attributes are restored from {origin}: {', '.join(restored)}", flush=True)
        for form, names in shown.items():
            _print_warning(form, names)


def restore_silently(
    trainer: L.Trainer, module: L.LightningModule, *, changed: ChangedAttributes, owners: tuple[str, ...] = ("",)
) -> None:
    """Set the result of `find_changed` of some owners before loaders or batches are made of it; `restore` comes later.

    Args:
        owners: beginnings of their names.
    """
    found = holders.find_holders(trainer, module)
    for owner, name, form in changed:
        if owner.startswith(owners) and holders.root_owner(owner) in found and not is_unsaved(form):
            _set_field(trainer, found, (owner, name), form)


def differing_names(trainer: L.Trainer, module: L.LightningModule, *, changed: ChangedAttributes) -> list[str]:
    """Return the names to print of attributes that have another value now than in the result of `find_changed`."""
    saved = {(owner, name): form for owner, name, form in changed}
    names = holders.HolderNames(trainer, module)
    differing = {
        shown_name(*place): None
        for place, value, _ in _fingerprints(names, tuple({owner for owner, _ in saved}))
        if place in saved
        and checksums.fingerprint(plain_forms.to_plain_on_host(value, names)) != checksums.fingerprint(saved[place])
    }
    return list(differing)


def shown_name(owner: str, name: str) -> str:
    """Return the attribute name to print: that of the outermost object; of layers and hooks whose they are."""
    if name in holder_fields.STRUCTURE:
        return f"{name.strip()} of {owner.partition(' ')[2] or 'the module'}"
    return holders.shown_name(owner, name)


def print_unsaved(changed: ChangedAttributes, named: set[str]) -> None:
    """Print what training has changed and this checkpoint cannot hold, each name once.

    Args:
        named: names that were printed before; new ones are added.
    """
    for form in WARNINGS:
        names = {
            shown_name(owner, name): None for owner, name, value in changed if isinstance(value, str) and value == form
        }
        _print_warning(form, [name for name in names if name not in named])
        named.update(names)


def _print_warning(form: str, names: Collection[str]) -> None:
    if names:
        fix = "Try: state_dict() and load_state_dict() of the object, the callback or the LightningDataModule, or "
        fix += "on_save_checkpoint() and on_load_checkpoint() of the LightningModule, that keep them"
        print(f"warning: {WARNINGS[form]}: {', '.join(names)}. {fix}", flush=True)


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
    """Yield each attribute with its place and its fingerprint."""
    for owner_name, owner in names.holders.items():
        if not owner_name.startswith(owners):
            continue
        for name, value in holder_fields.unsaved_fields(owner_name, owner):
            yield (owner_name, name), value, checksums.fingerprint(value, names)
