"""What a module, its data and its callbacks keep in attributes: whatever has changed there goes on, or is told.

A temperature that is set as an epoch begins, outputs that are gathered until it ends, a layer that is no longer frozen:
neither torch nor Lightning saves these. Of all attributes only those are kept that have changed since training began;
the others are what the config has built, and a run that goes on may mean to build them otherwise. What has changed and
cannot be kept is told when the run goes on.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hpc.state import checksums, holders, plain_forms, structure
from hpc.state.holders import COLLATE, CONTENT, DATA, DATASET

Place = tuple[str, str]  # an owner's name and an attribute's
Changed = Sequence[tuple[str, str, Any]]  # owner, name, plain form
Built = dict[Place, Any]  # of each place what tells a change
ITSELF = "itself"  # in the place of an attribute's name
TOLD = {
    plain_forms.NOT_KEPT: "attributes begin anew, as a checkpoint does not hold them",
    plain_forms.NOT_SEEN: "attributes begin anew, and whether training has changed them cannot be seen",
}
STRUCTURE = "layers and hooks that training has changed are those of the beginning, as a checkpoint does not hold them"


def built(trainer: L.Trainer, module: L.LightningModule, before: Built | None = None) -> Built:
    """What is there before training begins.

    Args:
        before: the same, before hooks in which weights may be copied and numbers be drawn. Tensors, arrays and networks
            that the module and its callbacks made since count as changed: made again, they would be others.
    """
    found = {}
    for place, value, mark in _all(holders.Names(trainer, module)):
        is_data = place[0].startswith((DATA, DATASET, COLLATE))
        if before is None or is_data or before.get(place) == mark or not _holds_arrays(value):
            found[place] = mark
    return found


def changed(trainer: L.Trainer, module: L.LightningModule, before: Built) -> Changed:
    """Owner, name and plain form of what is there now and was not in `built`, or was another; tensors on the host.

    In place of what has no plain form, or what data workers have in copies of their own: `forms.NOT_KEPT`; where no
    change could be seen, `forms.NOT_SEEN`. A dataset that was made since, as loaders are reloaded, has changed nothing.
    """
    found, made_since, names = [], set(), holders.Names(trainer, module)
    for (owner, name), value, mark in _all(names):
        if mark == before.get((owner, name)) and mark != checksums.UNSEEN:
            continue
        if name == ITSELF:
            made_since.add(owner)
        elif holders.root(owner) not in made_since and names.get(value) != holders.VIEW:
            form = plain_forms.NOT_KEPT if owner.startswith(DATASET) else plain_forms.kept(value, names)
            found.append((owner, name, plain_forms.NOT_SEEN if mark == checksums.UNSEEN else form))
    return found


def of_buffers(own: Mapping[str, Tensor]) -> Changed:
    """As `changed` returns what there is: buffers of this rank in place of those that the checkpoint has."""
    found = []
    for full, buffer in own.items():
        part, _, name = full.rpartition(".")
        found.append((f"module {part}", name, plain_forms.kept(buffer)))
    return found


def restore(trainer: L.Trainer, module: L.LightningModule, state: Changed) -> None:
    """Set what `changed` returned, as far as this run has such owners, and tell so."""
    there, kept = holders.of_run(trainer, module), dict[str, None]()
    told: dict[str, dict[str, None]] = {form: {} for form in TOLD}
    missing: list[str] = []
    for owner, name, form in state:
        shown = holders.attribute(owner, name)
        if holders.root(owner) not in there:
            continue
        if name in (structure.LAYERS, structure.HOOKS):
            missing += structure.missing(owner, there[owner], name, form) if owner in there else []
        elif form in (plain_forms.NOT_KEPT, plain_forms.NOT_SEEN):
            told[form][shown] = None
        elif _put(trainer, there, (owner, name), form, state):
            kept[shown] = None
        else:
            told[plain_forms.NOT_KEPT][shown] = None
    kept = {name: None for name in kept if name not in told[plain_forms.NOT_KEPT]}
    if kept and trainer.is_global_zero:
        print(f"train: attributes go on with the values that they had: {', '.join(kept)}", flush=True)
    for form, names in told.items():
        if names and trainer.is_global_zero:
            print(f"warning: {TOLD[form]}: {', '.join(names)}; a state_dict() of your module or data can", flush=True)
    if missing and trainer.is_global_zero:
        fix = "on_train_start must change them in a run that goes on, too, by current_epoch"
        print(f"warning: {STRUCTURE}: {', '.join(missing)}; {fix}", flush=True)


def restore_data(
    trainer: L.Trainer, module: L.LightningModule, state: Changed, among: tuple[str, ...] = (DATA, COLLATE)
) -> Built:
    """Set what the DataModule has, and what collates samples. Nothing is told: `restore` comes later.

    Args:
        among: with what the names of owners begin.

    Returns:
        What was there before, for `built`.
    """
    names = holders.Names(trainer, module)
    before = {place: mark for place, _, mark in _all(names, among)}
    of_data = [entry for entry in state if entry[0].startswith(among)]
    for owner, name, form in of_data:
        if holders.root(owner) in names.there and form not in (plain_forms.NOT_KEPT, plain_forms.NOT_SEEN):
            _put(trainer, names.there, (owner, name), form, state)
    return {(owner, name): before[owner, name] for owner, name, _ in of_data if (owner, name) in before}


def _put(trainer: L.Trainer, there: dict[str, Any], place: Place, form: Any, state: Changed) -> bool:
    """Set one attribute; is it there now?"""

    def find(wanted: str) -> Any:
        if wanted not in there:
            there.update(_again(wanted, there, state))
        return there[wanted]

    (owner, name), device = place, trainer.strategy.root_device
    try:
        it = there[owner]
        if name == CONTENT:
            holders.fill(
                it, plain_forms.unplain(form, {"object": find, plain_forms.ON_DEVICE: lambda one: one.to(device)})
            )
        else:
            plain_forms.put(it, name, form, find=find, device=device)
    except Exception:  # what this run lacks, and whatever a class of somebody else's raises
        return False
    return True


def _again(wanted: str, there: dict[str, Any], state: Changed) -> dict[str, Any]:
    """An object that training has made: a copy of one that is alike, as an average begins as a copy of a network.

    All that it had is set then, as it was not there when training began. Nothing is made by a name in a checkpoint.

    Returns:
        It and what is in it, by their names; nothing where none is alike.
    """
    inside = [entry for entry in state if entry[0].startswith(f"{wanted}/") and entry[1] == CONTENT]
    weights = {owner: one.shape for owner, _, form in inside if isinstance(one := plain_forms.content(form), Tensor)}
    for one in list(there.values()):
        if not wanted.endswith(f" ({type(one).__qualname__})") or not holders.can_be_copied(one):
            continue
        below = holders.below(holders.parts(wanted, one))
        if weights == _shapes(below):
            others = {id(it): it for it in there.values()}
            for it in below.values():
                others.pop(id(it), None)
            return holders.below(holders.parts(wanted, deepcopy(one, others)))
    return {}


def _shapes(there: dict[str, Any]) -> dict[str, torch.Size]:
    return {owner: it.shape for owner, it in there.items() if isinstance(it, nn.Parameter)}


def _all(names: holders.Names, among: tuple[str, ...] = ("",)) -> Iterator[tuple[Place, Any, Any]]:
    """Each attribute below its owner's name and its own, with what tells a change."""
    for owner, it in names.there.items():
        if not owner.startswith(among):
            continue
        if owner.startswith(DATASET) and "/" not in owner:
            yield (owner, ITSELF), it, id(it)
        for name, value in holders.fields(owner, it):
            yield (owner, name), value, checksums.mark(value, names)


def _holds_arrays(value: Any) -> bool:
    return any(isinstance(one, Tensor | np.ndarray) for one in tree_leaves(value))
