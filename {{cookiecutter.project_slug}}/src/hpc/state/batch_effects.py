"""What making a batch changes, and bringing it to the device: random numbers, generators and counters in attributes.

A run is saved when a batch was fetched, and fetches it once more when it goes on. Then all of this is put back to where
it was before that batch.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from hpc.state import attributes, checksums, holders, plain_forms, randomness, structure

HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
MOST_ENTRIES = 1000  # of a container, array or tensor that is copied before each batch
NO_ATTRIBUTES = (holders.CONTENT, structure.LAYERS, structure.HOOKS)  # in the place of a name
MODULE = "module "  # with which names of the module and its parts begin


class Fetched:
    """As it was before the last batch was made, where no workers do that: random numbers, and of the DataModule and of
    what collates samples numbers, words, generators, small containers, arrays and tensors."""

    owners: tuple[str, ...] = (holders.DATA, holders.COLLATE)

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.again: dict[str, Any] | None = None  # what `state` returned, to be put back before the next batch
        self._watched: list[tuple[str, str, Callable[[str], Any]]] = []
        self._noted: list[Any] = []
        self._random: Any = None
        self.built: attributes.Built = {}  # what was there before values were put back

    def begin(self) -> None:
        """Before the first batch of an epoch."""
        self._watched = []
        for owner, it in holders.of_run(self.trainer, self.trainer.lightning_module).items():
            if owner.startswith(self.owners) and not (owner.startswith(MODULE) and holders.is_of_library(type(it))):
                fields = ((name, value) for name, value in holders.fields(owner, it) if name not in NO_ATTRIBUTES)
                names = [name for name, value in fields if plain_forms.holds_data(value)]
                # Also buffers that a checkpoint has: it has them as they are afterwards.
                buffers = it._buffers if owner.startswith(MODULE) and "/" not in owner else ()
                self._watched += [(owner, name, _asked(it, name)) for name in dict.fromkeys([*names, *buffers])]

    def before(self) -> None:
        """Before each batch."""
        if self.again:
            if self.again["random"]:
                randomness.restore(self.again["random"])
            module, values = self.trainer.lightning_module, self.again["of_data"]
            self.built, self.again = attributes.restore_data(self.trainer, module, values, self.owners), None
        self._random = randomness.now()
        now = [ask(name) for _, name, ask in self._watched]
        self._noted = [value if type(value) in plain_forms.FIXED else _copied(value) for value in now]

    def state(self) -> dict[str, Any] | None:
        """What the last batch has changed, as it was before: plain data."""
        of_data = []
        for (owner, name, ask), noted in zip(self._watched, self._noted, strict=False):
            now = ask(name)
            if now is noted:
                continue
            before = noted if plain_forms.is_generator(now) else plain_forms.kept(noted)
            if before != plain_forms.NOT_KEPT and checksums.mark(before) != checksums.mark(plain_forms.kept(now)):
                of_data.append((owner, name, before))
        return {"random": randomness.state(self._random), "of_data": of_data}


class Transferred(Fetched):
    """The same before the last batch of training was brought to the device, also of the module and of its parts."""

    owners = (*Fetched.owners, MODULE)

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer)
        self._epoch: int | None = None
        if transfers(trainer.lightning_module) or transfers(getattr(trainer, "datamodule", None)):
            # Lightning has no hook before its own. It asks this for whose hook to call, first for the first one.
            selector: Any = trainer._data_connector._datahook_selector
            selector.get_instance = self._noting(selector.get_instance)

    def _noting(self, get_instance: Callable[[str], Any]) -> Callable[[str], Any]:
        def noted(hook: str) -> Any:
            if hook == HOOKS[0] and self.trainer.training:
                if self._epoch != self.trainer.current_epoch:
                    self._epoch = self.trainer.current_epoch
                    self.begin()
                self.before()
            return get_instance(hook)

        return noted

    def state(self) -> dict[str, Any] | None:
        return super().state() if self._random else None


def transfers(owner: Any) -> bool:
    """Does a researcher's own code take part in bringing a batch to the device?"""
    return owner is not None and any(is_overridden(hook, owner) for hook in HOOKS)


def _asked(it: Any, name: str) -> Callable[[str], Any]:
    """What gives an attribute by its name, many times quicker than a module does."""
    for held in (getattr(it, "__dict__", {}), getattr(it, "_buffers", {})):
        if name in held:
            return held.get
    return partial(_attribute, it)


def _attribute(it: Any, name: str) -> Any:
    return getattr(it, name, None)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= MOST_ENTRIES else value
    if plain_forms.is_generator(value):
        return plain_forms.plain(value)
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= MOST_ENTRIES else value
    return copy(value) if isinstance(value, plain_forms.CONTAINERS) and len(value) <= MOST_ENTRIES else value
