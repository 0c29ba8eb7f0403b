"""What making a batch changes where no workers do it: random numbers, and in a DataModule a generator or a counter.

A run is saved when a batch was fetched, and fetches it once more when it goes on. Then all of this is put back to where
it was before that batch.
"""

from copy import copy
from typing import Any

import lightning as L

from . import attributes, forms, holders, marks, randomness

MOST_ENTRIES = 1000  # of a container that is copied before each batch


class Fetched:
    """As it was before the last batch: random numbers, and of the DataModule and of what collates samples numbers,
    words, generators and small containers."""

    def __init__(self, trainer: L.Trainer) -> None:
        self.trainer = trainer
        self.again: dict[str, Any] | None = None  # what `state` returned, to be put back before the next batch
        self._watched: list[tuple[str, str, Any]] = []
        self._noted: list[Any] = []
        self._random: Any = None

    def begin(self) -> None:
        """Before the first batch of an epoch."""
        self._watched = []
        for owner, it in holders.of_run(self.trainer, self.trainer.lightning_module).items():
            if owner.startswith((holders.DATA, holders.COLLATE)):
                names = [name for name, value in holders.fields(owner, it) if name and forms.holds_data(value)]
                self._watched += [(owner, name, it) for name in names]

    def before(self) -> None:
        """Before each batch."""
        if self.again:
            randomness.restore(self.again["random"])
            attributes.restore_data(self.trainer, self.trainer.lightning_module, self.again["of_data"])
            self.again = None
        self._random = randomness.of_host()
        self._noted = [_copied(getattr(it, name, None)) for _, name, it in self._watched]

    def state(self) -> dict[str, Any]:
        """What the last batch has changed, as it was before: plain data."""
        of_data = []
        for (owner, name, it), noted in zip(self._watched, self._noted, strict=False):
            now = getattr(it, name, None)
            before = noted if forms.is_generator(now) else forms.kept(noted)
            if before != forms.NOT_KEPT and marks.mark(before) != marks.mark(forms.kept(now)):
                of_data.append((owner, name, before))
        return {"random": randomness.state(self._random), "of_data": of_data}


def _copied(value: Any) -> Any:
    if forms.is_generator(value):
        return forms.plain(value)
    return copy(value) if isinstance(value, forms.CONTAINERS) and len(value) <= MOST_ENTRIES else value
