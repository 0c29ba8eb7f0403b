"""Stop within a validation, a sanity check or a test.

Nothing is saved there: the run resumes from the checkpoint before it, and repeats all of it. So a checkpoint precedes
the step before a long validation.
"""

import time
from typing import Any

LONG_SECONDS = 10.0  # a stop waits for a validation that takes no longer


class ValidationClock:
    """Measures validations, to know whether a stop would wait for the end of one.

    Attributes:
        is_long: whether a validation takes longer than that; None: not known yet.
    """

    def __init__(self) -> None:
        self.is_long: bool | None = None
        self._start_time = 0.0

    def begin(self) -> None:
        self._start_time = time.monotonic()

    def update(self, trainer: Any) -> None:
        """Update `is_long` at the end of a validation; the time of a sanity check is scaled up."""
        seconds = time.monotonic() - self._start_time
        if trainer.sanity_checking:
            seconds *= sum(trainer.num_val_batches) / sum(trainer.num_sanity_val_batches)
        self.is_long = seconds > LONG_SECONDS


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
