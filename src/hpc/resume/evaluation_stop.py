"""Stop within a validation, a sanity check or a test.

Nothing is saved there: the run resumes from the checkpoint before it, and repeats all of it. So a checkpoint precedes
the step before a long validation.
"""

import time
from collections.abc import Callable
from typing import Any

from hpc.resume.agreement import Agreement, RankRequest

LONG_SECONDS = 10.0  # a stop waits for a validation that takes no longer


class EvaluationStop:
    """Agreements at the batches of an evaluation, which the ranks count alike, on whether to stop.

    Args:
        step_agreement: the agreement between two steps.
        stop_reason: return the index of this rank's reason to stop; 0: none.

    Attributes:
        is_validation_long: whether a validation takes longer than a stop would wait; None: not known yet.
    """

    def __init__(self, step_agreement: Agreement, stop_reason: Callable[[], int]) -> None:
        self.stop_reason = stop_reason
        self.agreement = Agreement(lambda: bool(stop_reason()), shares_group_of=step_agreement)
        self.is_validation_long: bool | None = None
        self._num_batches = 0
        self._start_time = 0.0

    def begin(self) -> None:
        """Start the clock, and let the ranks agree at the next batch."""
        self._start_time, self.agreement.next_step = time.monotonic(), self._num_batches

    def agree_on_stop(self) -> int:
        """Return the index of the reason why all ranks stop at this batch, which begins; 0: they do not stop."""
        self._num_batches += 1
        if not self.agreement.is_due(self._num_batches):
            return 0
        return self.agreement.all_reduce_requests(self._num_batches, RankRequest(stop=self.stop_reason())).stop

    def update_is_validation_long(self, trainer: Any) -> None:
        """Update `is_validation_long` at the end of a validation; the time of a sanity check is scaled up."""
        seconds = time.monotonic() - self._start_time
        if trainer.sanity_checking:
            seconds *= sum(trainer.num_val_batches) / sum(trainer.num_sanity_val_batches)
        self.is_validation_long = seconds > LONG_SECONDS


def is_validation_next(trainer: Any) -> bool:
    """Return whether a validation follows within the optimizer step that begins now, or right after it.

    It is the same on all ranks: Lightning's loop decides it in this way after each micro-batch. A validation that
    `should_stop` brings is not foreseen.
    """
    loop = trainer.fit_loop.epoch_loop
    if not loop._should_check_val_epoch():
        return False
    interval = trainer.val_check_batch
    if interval == float("inf"):  # the loader has no length
        is_last_step = loop.batch_idx + trainer.accumulate_grad_batches >= trainer.num_training_batches
        return loop.batch_progress.is_last_batch or is_last_step
    # The last step of an epoch may have fewer micro-batches.
    num_batches = min(trainer.accumulate_grad_batches, trainer.num_training_batches - loop.batch_idx)
    num_done = loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx
    return (num_done // interval + 1) * interval <= num_done + num_batches
