"""Attributes that a piece of work changes: making loaders, making a batch, moving it to the device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from operator import length_hint
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from hpc.state import attributes, checksums, holder_fields, holders, plain_forms

HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
NO_ATTRIBUTES = (holder_fields.CONTENT, *holder_fields.STRUCTURE)  # in place of a name
MODULE = "module "  # beginning of the names of the module and of its parts
FIRST_BATCHES = 2  # of an epoch, at which attributes may be new: the first batch may make them
OF_DATA = (holders.DATA, holders.COLLATE)
OF_ALL = (*OF_DATA, MODULE)


class AttributeEffects:
    """Attributes of the data, of what collates samples, and of the module, before some work and after it.

    These are numbers, strings, generators, small containers, arrays and tensors.

    Args:
        owners: beginnings of the names of those that are looked at.
        max_entries: of a container, array or tensor that is copied.
    """

    def __init__(self, trainer: L.Trainer, *, owners: tuple[str, ...] = OF_ALL, max_entries: int) -> None:
        self.trainer, self.owners, self.max_entries = trainer, owners, max_entries
        self._watched: list[tuple[str, str, Callable[[str], Any]]] = []  # owner, name, getter by name
        self._values: list[Any] = []  # of those, before the work

    def choose(self) -> None:
        """Choose the attributes to look at."""
        self._watched = []
        for owner_name, owner in holders.find_holders(self.trainer, self.trainer.lightning_module).items():
            is_module = owner_name.startswith(MODULE)
            if not owner_name.startswith(self.owners):
                continue
            if is_module and holder_fields.is_library_class(type(owner)):
                continue
            fields = holder_fields.unsaved_fields(owner_name, owner)
            data = ((name, value) for name, value in fields if name not in NO_ATTRIBUTES)
            names = [name for name, value in data if plain_forms.may_have_plain_form(value)]
            # Buffers, too: a checkpoint has them as they are after the batch.
            buffers = owner._buffers if is_module and "/" not in owner_name else ()
            self._watched += [(owner_name, name, _getter(owner, name)) for name in dict.fromkeys([*names, *buffers])]

    def capture(self) -> None:
        """Copy their values before the work."""
        values = [get(name) for _, name, get in self._watched]
        self._values = [value if type(value) in plain_forms.IMMUTABLE_TYPES else self._copy(value) for value in values]

    def changed(self) -> list[tuple[str, str, Any]]:
        """Return owner, name and plain form before the work of the attributes that it has changed."""
        changed = []
        for (owner, name, get), before in zip(self._watched, self._values, strict=False):
            now = get(name)
            if now is before or _is_equal(now, before):
                continue
            is_form = plain_forms.is_generator(now) or (plain_forms.is_iterator(now) and isinstance(before, dict))
            form = before if is_form else plain_forms.to_plain_on_host(before)
            present = plain_forms.to_plain_on_host(now)
            if form != plain_forms.NOT_KEPT and checksums.fingerprint(form) != checksums.fingerprint(present):
                changed.append((owner, name, form))
        return changed

    def present(self, changed: Sequence[tuple[str, str, Any]]) -> list[tuple[str, str, Any]]:
        """Return these attributes with their present values."""
        places = {(owner, name) for owner, name, _ in changed}
        watched = ((owner, name, get(name)) for owner, name, get in self._watched if (owner, name) in places)
        return [(owner, name, plain_forms.to_plain_on_host(value)) for owner, name, value in watched]

    def restore(self, changed: attributes.ChangedAttributes) -> None:
        """Set the result of `changed` or `present`."""
        attributes.restore_silently(self.trainer, self.trainer.lightning_module, changed=changed, owners=self.owners)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone() if value.numel() <= self.max_entries else value
        if plain_forms.is_generator(value):
            return plain_forms.to_plain(value)
        if plain_forms.is_iterator(value):
            return plain_forms.to_plain_on_host(value) if length_hint(value) <= self.max_entries else value
        if isinstance(value, np.ndarray):
            return value.copy() if value.size <= self.max_entries else value
        is_small = isinstance(value, plain_forms.CONTAINERS) and len(value) <= self.max_entries
        return copy(value) if is_small else value


class BatchEffects:
    """Names the attributes that making a batch of training, or moving it to the device, changes.

    A run is saved when its next batch is there, so a resumed run makes that batch with these attributes as they are
    after it. Random numbers need not be named: there they follow from the place of the batch.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self._effects: dict[tuple[str, ...], AttributeEffects] = {
            owners: AttributeEffects(trainer, owners=owners, max_entries=1000) for owners in (OF_DATA, OF_ALL)
        }
        self._num_watched: dict[tuple[str, ...], tuple[int, int]] = {}  # the epoch, and batches in it
        self._names: dict[str, None] = {}

    @contextmanager
    def watch(self, owners: tuple[str, ...] = OF_DATA) -> Iterator[None]:
        """Note what the block changes."""
        if not self.trainer.training:
            yield
            return
        effects, epoch = self._effects[owners], self.trainer.current_epoch
        last_epoch, num = self._num_watched.get(owners, (None, 0))
        num = num + 1 if last_epoch == epoch else 0
        self._num_watched[owners] = epoch, num
        if num < FIRST_BATCHES:
            effects.choose()
        effects.capture()
        yield
        self._names |= {holders.shown_name(owner, name): None for owner, name, _ in effects.changed()}

    def print_names(self, named: set[str]) -> None:
        """Print each name once.

        Args:
            named: names that were printed before; new ones are added.
        """
        names = [name for name in self._names if name not in named]
        named.update(names)
        if names:
            rule = (
                "these attributes change as a batch is made or moved to the device, so a resumed run makes its first "
            )
            rule += "batch with other values of them"
            fix = (
                "a batch that follows from its samples and random numbers alone, or the change in on_train_batch_start"
            )
            print(f"warning: {rule}: {', '.join(names)}. Try: {fix}", flush=True)


def has_transfer_hooks(owner: Any) -> bool:
    """Return whether the researcher's own code takes part in moving a batch to the device."""
    return owner is not None and any(is_overridden(hook, owner) for hook in HOOKS)


def _is_equal(now: Any, before: Any) -> bool:
    """Return whether two values are certainly equal; False also where it cannot be known at once."""
    if type(now) is not type(before):
        return False
    if isinstance(now, Tensor):
        return now.shape == before.shape and now.dtype == before.dtype and torch.equal(now, before)
    if isinstance(now, np.ndarray):
        return now.shape == before.shape and now.dtype == before.dtype and bool((now == before).all())
    try:
        return bool(now == before)
    except (RuntimeError, ValueError, TypeError):  # of arrays and tensors in a container
        return False


def _getter(owner: Any, name: str) -> Callable[[str], Any]:
    """Return a function that gives an attribute by its name, many times faster than a module's own lookup."""
    for values in (getattr(owner, "__dict__", {}), getattr(owner, "_buffers", {})):
        if name in values:
            return values.get
    return partial(_get_attribute, owner)


def _get_attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)
