"""Attributes that change as a batch is made, or moved to the device: they are named, as a resume cannot repeat that."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from hpc.state import attributes, checksums, holder_fields, holders, plain_forms

HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
NO_ATTRIBUTES = (holder_fields.CONTENT, *holder_fields.STRUCTURE)  # in place of a name
MODULE = "module "  # beginning of the names of the module and of its parts
FIRST_BATCHES = 2  # of an epoch, at which attributes may be new: the first batch may make them
MAX_ENTRIES, MAX_DEPTH = 1000, 10  # what is larger or deeper counts by its identity
OF_DATA = (holders.DATA, holders.COLLATE)
OF_ALL = (*OF_DATA, MODULE)
Getter = Callable[[str], Any]


class BatchEffects:
    """Names the attributes that making a batch of training, or moving it to the device, changes.

    A run is saved when its next batch is there, so a resumed run makes that batch with these attributes as they are
    after it. Random numbers need not be named: there they follow from the place of the batch.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self._watched: dict[tuple[str, ...], list[tuple[str, str, Getter]]] = {}  # owner, name, getter by name
        self._num_watched: dict[tuple[str, ...], tuple[int, int]] = {}  # the epoch, and batches in it
        self._names: dict[str, None] = {}

    @contextmanager
    def watch(self, owners: tuple[str, ...] = OF_DATA) -> Iterator[None]:
        """Note what the block changes.

        Args:
            owners: beginnings of the names of those that are looked at.
        """
        if not self.trainer.training:
            yield
            return
        epoch = self.trainer.current_epoch
        last_epoch, num = self._num_watched.get(owners, (None, 0))
        num = num + 1 if last_epoch == epoch else 0
        self._num_watched[owners] = epoch, num
        if num < FIRST_BATCHES:
            self._watched[owners] = list(_plain_attributes(self.trainer, owners))
        watched = self._watched[owners]
        before = _marks([get(name) for _, name, get in watched])
        yield
        now = _marks([get(name) for _, name, get in watched])
        for (owner, name, _), mark, mark_before in zip(watched, now, before, strict=True):
            if mark is not mark_before and mark != mark_before:
                self._names[attributes.shown_name(owner, name)] = None

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


def _plain_attributes(trainer: L.Trainer, owners: tuple[str, ...]) -> Iterator[tuple[str, str, Getter]]:
    for owner_name, owner in holders.find_holders(trainer, trainer.lightning_module).items():
        is_library_layer = owner_name.startswith(MODULE) and holder_fields.is_library_class(type(owner))
        if is_library_layer or not owner_name.startswith(owners):
            continue
        fields = dict(holder_fields.unsaved_fields(owner_name, owner)) | holder_fields.saved_buffers(owner_name, owner)
        for name, value in fields.items():
            if name not in NO_ATTRIBUTES and plain_forms.may_have_plain_form(value):
                yield owner_name, name, _getter(owner, name)


def _getter(owner: Any, name: str) -> Getter:
    """Return a function that gives an attribute by its name, many times faster than a module's own lookup."""
    for values in (getattr(owner, "__dict__", {}), getattr(owner, "_buffers", {})):
        if name in values:
            return values.get
    return lambda key: getattr(owner, key, None)


def _marks(values: Collection[Any], depth: int = 0) -> list[Any]:
    """Return what is equal as long as values have not changed; it is far faster than a fingerprint of each."""
    plain = plain_forms.IMMUTABLE_TYPES
    return [value if type(value) in plain else _mark(value, depth) for value in values]


def _mark(value: Any, depth: int) -> tuple[Any, Any]:
    kind = type(value)
    if isinstance(value, plain_forms.CONTAINERS) and len(value) <= MAX_ENTRIES and depth < MAX_DEPTH:
        return kind, _marks([*value, *value.values()] if isinstance(value, dict) else value, depth + 1)
    if plain_forms.may_have_plain_form(value) and plain_forms.is_small(value, MAX_ENTRIES):
        return kind, checksums.fingerprint(value)
    return id(value), [value]  # kept, so that no other object gets this id
