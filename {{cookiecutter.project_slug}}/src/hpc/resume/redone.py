"""Stopping within what is done again as a whole afterwards: a validation, a sanity check, a test, SWA's last epoch.

Nothing is saved there: the run goes on from the checkpoint before. A long validation is therefore preceded by one, made
before the step that it follows.
"""

import time
from collections.abc import Callable
from typing import Any

from hpc.resume.agreement import Agreement, Wish

LONG = 10.0  # seconds; a validation that takes no longer is waited for


class Redone:
    """The batches of all these, which the ranks count alike, and at which they agree whether to stop.

    Args:
        steps: what the ranks agree by between two steps.
        reason: why this rank wants to stop; 0: it does not.
    """

    def __init__(self, steps: Agreement, reason: Callable[[], int]) -> None:
        self.reason = reason
        self.agreement = Agreement(lambda: bool(reason()), beside=steps)
        self._batches = 0
        self._began = 0.0
        self.long: bool | None = None  # is a validation too long to be waited for? None: that is not known yet

    def begin(self) -> None:
        """The ranks agree at the next batch."""
        self._began, self.agreement.next_step = time.monotonic(), self._batches

    def stop(self) -> int:
        """At the beginning of a batch: why all ranks stop here; 0: they do not."""
        self._batches += 1
        if not self.agreement.due(self._batches):
            return 0
        return self.agreement.ask(self._batches, Wish(stop=self.reason())).stop

    def validated(self, trainer: Any) -> None:
        """A validation is over, or a sanity check, which tells how long one will take."""
        seconds = time.monotonic() - self._began
        if trainer.sanity_checking:
            seconds *= sum(trainer.num_val_batches) / sum(trainer.num_sanity_val_batches)
        self.long = seconds > LONG


def validation_follows(trainer: Any) -> bool:
    """Within the optimizer step that begins now, or right after it? All ranks say the same.

    As Lightning's loop decides it after each micro-batch. A validation that `should_stop` brings is not foreseen.
    """
    loop = trainer.fit_loop.epoch_loop
    if not loop._should_check_val_epoch():
        return False
    every = trainer.val_check_batch
    if every == float("inf"):  # the loader has no length
        last = loop.batch_idx + trainer.accumulate_grad_batches >= trainer.num_training_batches
        return loop.batch_progress.is_last_batch or last
    # The last step of an epoch may be made of fewer batches.
    batches = min(trainer.accumulate_grad_batches, trainer.num_training_batches - loop.batch_idx)
    done = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
    return (done // every + 1) * every <= done + batches
