"""What all ranks must decide alike, agreed about once a second; the steps between exchange nothing."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from hpc.resume.early_agreement import Early

ABOUT = 1.0  # seconds between two agreements
GROWTH = 8  # at most so many times as many steps till the next one: the first steps of a run tell little


@dataclass(frozen=True)
class Wish:
    """What one rank wants, or what all of them do: the largest of each number."""

    stop: int = 0  # index of the reason, 0: none
    save: int = 0
    best: int = 0
    not_finite: int = 0
    redo: int = 0  # a validation follows that is not waited for when the run is to stop
    apart: int = 0  # no wish, but found by asking: ranks differ in what they must have alike


class Agreement:
    """All ranks call `ask` at the same steps, as each of them is told by the one before, or by `early`.

    Args:
        wanted: does this rank want to be asked as soon as possible?
        beside: another agreement of the same ranks, which counts something else.
    """

    def __init__(self, wanted: Callable[[], bool] = lambda: False, beside: "Agreement | None" = None) -> None:
        several = dist.is_available() and dist.is_initialized()
        ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        # On the host, whatever the devices do: asking waits for no kernel.
        self.group: Any = beside.group if beside else dist.new_group(backend="gloo") if several else None
        self.early = Early(wanted, *ranks, name="beside" if beside else "early")
        self.next_step = 0
        self._every = 1
        self._asked = (0, time.monotonic())

    def due(self, step: int) -> bool:
        """Do all ranks ask at this step? To be called once at each."""
        return step >= self.next_step or self.early.reach(step)

    def ask(self, step: int, wish: Wish, alike: int = 0) -> Wish:
        """The wishes of all ranks together, at an optimizer step that they share.

        Args:
            alike: checksum of what all ranks must have alike.
        """
        numbers = [getattr(wish, field.name) for field in fields(Wish)]
        numbers += [alike, -alike, -self._steps_per(ABOUT, step)]
        if self.group is not None:
            told = torch.tensor(numbers)
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group)
            numbers = told.tolist()
        self._every = -numbers.pop()  # the slowest rank's
        self.next_step = step + self._every
        self._asked = (step, time.monotonic())
        self.early.agreed(step)
        *wanted, most, minus_least = numbers
        return replace(Wish(*wanted), apart=int(most != -minus_least))

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.group is not None:
            dist.barrier(self.group)

    def _steps_per(self, seconds: float, step: int) -> int:
        steps, took = step - self._asked[0], time.monotonic() - self._asked[1]
        return max(1, min(int(seconds * steps / max(took, 1e-9)), self._every * GROWTH)) if steps > 0 else self._every
