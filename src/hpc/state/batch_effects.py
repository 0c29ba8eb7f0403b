"""Changes that come from making a batch and moving it to the device: in random numbers, generators, and attributes.

A run is saved when a batch was fetched, and fetches it once more when it is resumed. Before that, all of these are set
back to what they were before that batch.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from operator import length_hint
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from hpc.state import attributes, checksums, holder_fields, holders, plain_forms, randomness, structure

HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
NO_ATTRIBUTES = (holder_fields.CONTENT, structure.LAYERS, structure.HOOKS)  # in place of a name
MODULE = "module "  # beginning of the names of the module and of its parts


class FetchEffects:
    """The state before the last batch was made, where no workers make batches.

    It has the random numbers and, of the DataModule and of objects that collate samples: numbers, strings, generators,
    small containers, arrays and tensors.

    Attributes:
        to_restore: the result of `state`, to be restored before the next batch.
        initial: fingerprints of the restored attributes, taken before the restore.
    """

    owners: tuple[str, ...] = (holders.DATA, holders.COLLATE)  # beginnings of names
    max_entries = 1000  # of a container, array or tensor that is copied before each batch

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.to_restore: dict[str, Any] | None = None
        self.initial: attributes.InitialAttributes = {}
        self._watched: list[tuple[str, str, Callable[[str], Any]]] = []  # owner, name, getter by name
        self._values: list[Any] = []  # of those, before the last batch
        self._random: Any = None

    def begin_epoch(self) -> None:
        """Choose the attributes to watch; called before the first batch of an epoch."""
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

    def restore_and_capture(self) -> None:
        """Restore `to_restore` if there is one, then capture the present state; called before each batch."""
        if self.to_restore:
            if self.to_restore["random"]:
                randomness.restore(self.to_restore["random"])
            self.initial = self.restore(self.to_restore["of_data"])
            self.to_restore = None
        self._random = randomness.capture()
        values = [get(name) for _, name, get in self._watched]
        self._values = [value if type(value) in plain_forms.IMMUTABLE_TYPES else self._copy(value) for value in values]

    def restore(self, changed: attributes.ChangedAttributes) -> attributes.InitialAttributes:
        """Set these attributes, and return their fingerprints before."""
        module = self.trainer.lightning_module
        return attributes.restore_data(self.trainer, module, changed=changed, owners=self.owners)

    def state(self) -> dict[str, Any] | None:
        """Return the random numbers before the last batch, and the attributes that it changed, as plain data."""
        return {"random": randomness.plain_state(self._random), "of_data": self.changed()}

    def changed(self) -> list[tuple[str, str, Any]]:
        """Return owner, name and plain form of the attributes that were changed since `restore_and_capture`."""
        changed = []
        for (owner, name, get), before in zip(self._watched, self._values, strict=False):
            now = get(name)
            if now is before:
                continue
            is_form = plain_forms.is_generator(now) or (plain_forms.is_iterator(now) and isinstance(before, dict))
            form = before if is_form else plain_forms.to_plain_on_host(before)
            present = plain_forms.to_plain_on_host(now)
            if form != plain_forms.NOT_KEPT and checksums.fingerprint(form) != checksums.fingerprint(present):
                changed.append((owner, name, form))
        return changed

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


class TransferEffects(FetchEffects):
    """The state before the last batch of training was moved to the device; also of the module and of its parts."""

    owners = (*FetchEffects.owners, MODULE)

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer)
        self._epoch: int | None = None
        if has_transfer_hooks(trainer.lightning_module) or has_transfer_hooks(getattr(trainer, "datamodule", None)):
            # Before each hook Lightning calls `get_instance(hook)`; the call for HOOKS[0] comes first.
            selector: Any = trainer._data_connector._datahook_selector
            selector.get_instance = self._noting_state(selector.get_instance)

    def _noting_state(self, get_instance: Callable[[str], Any]) -> Callable[[str], Any]:
        def get_instance_after_noting(hook: str) -> Any:
            if hook == HOOKS[0] and self.trainer.training:
                if self._epoch != self.trainer.current_epoch:
                    self._epoch = self.trainer.current_epoch
                    self.begin_epoch()
                self.restore_and_capture()
            return get_instance(hook)

        return get_instance_after_noting

    def state(self) -> dict[str, Any] | None:
        """Return the same as for a fetched batch; None if no batch was moved yet."""
        return super().state() if self._random else None


def has_transfer_hooks(owner: Any) -> bool:
    """Return whether the researcher's own code takes part in moving a batch to the device."""
    return owner is not None and any(is_overridden(hook, owner) for hook in HOOKS)


def _getter(owner: Any, name: str) -> Callable[[str], Any]:
    """Return a function that gives an attribute by its name, many times faster than a module's own lookup."""
    for values in (getattr(owner, "__dict__", {}), getattr(owner, "_buffers", {})):
        if name in values:
            return values.get
    return partial(_get_attribute, owner)


def _get_attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)
