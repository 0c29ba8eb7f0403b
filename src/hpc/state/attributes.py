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
MAX_ENTRIES = 1_000_000  # of a container, array or tensor that is copied before loaders are made
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
    return initial | {place: checksums.fingerprint(value, names) for place, value in _attributes(names)}


def changes(
    trainer: L.Trainer, module: L.LightningModule, *, initial: InitialAttributes
) -> Iterator[tuple[Place, Any, Any]]:
    """Yield place, fingerprint and plain form of attributes that are new or changed; tensors of a form on the host.

    `plain_forms.NOT_KEPT` stands for a value that cannot be saved: it has no plain form, holds an object that training
    has made, or workers hold copies.
    `plain_forms.NOT_SEEN` for one whose change cannot be detected.
    """
    names = holders.HolderNames(trainer, module)
    made = _made_owners(names, initial)
    for place, value in _attributes(names):
        fingerprint = checksums.fingerprint(value, names)
        is_as_before = fingerprint == initial.get(place) and fingerprint != checksums.UNREADABLE
        if not is_as_before and place[0] not in made and names.get(value) != holders.VIEW:  # what holds them is named
            is_read = fingerprint != checksums.UNREADABLE
            yield place, fingerprint, _plain_form(names, made, place, value) if is_read else plain_forms.NOT_SEEN


def small_values(
    trainer: L.Trainer,
    module: L.LightningModule,
    *,
    owners: tuple[str, ...],
    initial: InitialAttributes | None = None,
) -> dict[Place, Any]:
    """Return plain forms of all attributes and buffers that have one and are not large.

    Args:
        owners: beginnings of their names.
        initial: objects that training has made since are left out.
    """
    names = holders.HolderNames(trainer, module)
    made = set() if initial is None else _made_owners(names, initial)
    values = {}
    for place, value in _attributes(names, owners, with_buffers=True):
        if place[0] not in made and names.get(value) != holders.VIEW and plain_forms.is_small(value, MAX_ENTRIES):
            form = _plain_form(names, made, place, value)
            if not is_unsaved(form):
                values[place] = form
    return values


def differing(values: dict[Place, Any], now: dict[Place, Any]) -> ChangedAttributes:
    """Return those of the values that are others or lacking now. Both are results of `small_values`."""
    return [
        (*place, form)
        for place, form in values.items()
        if checksums.fingerprint(form) != checksums.fingerprint(now.get(place, plain_forms.NOT_KEPT))
    ]


def is_unsaved(form: Any) -> bool:
    """Return whether a form stands for a value that a checkpoint cannot hold."""
    return isinstance(form, str) and form in WARNINGS


def restore(
    trainer: L.Trainer, module: L.LightningModule, *, changed: ChangedAttributes, is_other_rank: bool = False
) -> None:
    """Set what `changes` has yielded, as far as this run has such owners, and print what was and was not restored.

    Args:
        is_other_rank: all ranks take rank 0's, as their number has changed.
    """
    shown = restore_silently(trainer, module, changed=changed)
    if trainer.is_global_zero:
        origin = "the checkpoint, those of rank 0 on all ranks" if is_other_rank else "the checkpoint"
        restored = [name for name in shown.pop("restored") if name not in shown[plain_forms.NOT_KEPT]]
        if restored:
            print(f"train: these attributes are restored from {origin}: {', '.join(restored)}", flush=True)
        for form, names in shown.items():
            _print_warning(form, names)


def restore_silently(
    trainer: L.Trainer, module: L.LightningModule, *, changed: ChangedAttributes, owners: tuple[str, ...] = ("",)
) -> dict[str, dict[str, None]]:
    """Set values of some owners, as far as this run has them. Return what became of each.

    Args:
        owners: beginnings of their names.

    Returns:
        the names to print, below "restored" and the keys of `WARNINGS`.
    """
    found = holders.find_holders(trainer, module)
    shown: dict[str, dict[str, None]] = {kind: {} for kind in ("restored", *WARNINGS)}
    for owner, name, form in changed:
        if owner.startswith(owners) and holders.root_owner(owner) in found:
            is_set = not is_unsaved(form) and _set_field(trainer, found, (owner, name), form)
            kind = "restored" if is_set else form if is_unsaved(form) else plain_forms.NOT_KEPT
            shown[kind][shown_name(owner, name)] = None
    return shown


def shown_name(owner: str, name: str) -> str:
    """Return the attribute name to print: that of the outermost object; of layers and hooks whose they are."""
    if name in holder_fields.STRUCTURE:
        return f"{name.strip()} of {owner.partition(' ')[2] or 'the module'}"
    return owner.split("/")[1].partition(" (")[0] if "/" in owner else name


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
        owner, find = owners[owner_name], owners.__getitem__
        if not holder_fields.may_have_changed(owner_name, owner, name):
            return False
        present = owner if name == CONTENT else getattr(owner, name, None)
        value = plain_forms.value_of(form, present, find=find, device=device)
        is_given = isinstance(owner, restorable.RECORDS) and restorable.is_given(*_holder_of(owner_name, owners))
        if is_given and not restorable.has_only_given_texts(value, present):
            return False
        if name == CONTENT:
            holder_fields.fill_content(owner, value)
        else:
            restorable.set_attribute(owner, name, form=form, find=find, device=device)
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


def _made_owners(names: holders.HolderNames, initial: InitialAttributes) -> set[str]:
    """Return the objects that training has made."""
    return {owner for owner in names.holders if (owner, EXISTS) not in initial and "/" in owner}


def _plain_form(names: holders.HolderNames, made: set[str], place: Place, value: Any) -> Any:
    """Return the plain form of an attribute, or `plain_forms.NOT_KEPT`."""
    if place[0].startswith(DATASET) or place[1] in holder_fields.STRUCTURE or value is checksums.UNREADABLE:
        return plain_forms.NOT_KEPT
    return plain_forms.to_plain_on_host(value, _NamesFromBefore(names, made))


def _attributes(
    names: holders.HolderNames, owners: tuple[str, ...] = ("",), *, with_buffers: bool = False
) -> Iterator[tuple[Place, Any]]:
    """Yield the attributes that nobody else saves, and also the buffers of the module's own parts."""
    for owner_name, owner in names.holders.items():
        if owner_name.startswith(owners):
            buffers = holder_fields.saved_buffers(owner_name, owner).items() if with_buffers else ()
            for name, value in (*holder_fields.unsaved_fields(owner_name, owner), *buffers):
                yield (owner_name, name), value
