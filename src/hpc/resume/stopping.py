"""Reasons for which a run stops: a signal, the end of the job's time, or a search that prunes it."""

import time
from collections.abc import Mapping
from typing import NoReturn, Protocol

import lightning as L

from hpc.logging import hyperparameters
from hpc.resume.agreement import Agreement
from hpc.run import attempt_log
from hpc.run.signals import INTERRUPTED, ORPHANED, SignalState
from hpc.run.watchdog import Stopped
from hpc.training.attempt import Attempt

PRUNED = "pruned: worse than the median trial"
JOB_END = "the end of the job's time"
# Ranks exchange the index of a reason. If they have several, the largest one counts.
REASONS = ("", "SIGHUP", "SIGUSR1", "SIGUSR2", INTERRUPTED, "SIGTERM", ORPHANED, JOB_END, PRUNED)
SPARE_SECONDS = 10  # before the end of the job, beyond what a save and two steps take


class ReportsTrial(Protocol):
    """The search that a run belongs to, as far as the run reports to it."""

    def report(self, number: int, value: float) -> bool:
        """Report the metric of a validation, counted from 0. Return whether the run must be pruned."""
        ...

    def end(self, outcome: str, value: float | None = None) -> None:
        """Report the outcome: complete, which has a value, or pruned. A run that fails goes on with its trial later."""
        ...


class StopReasons:
    """The reasons why this rank wants to stop.

    Args:
        job_end: unix time at which the scheduler ends the job; None: it does not.

    Attributes:
        is_pruned: whether the search has pruned this run.
    """

    def __init__(self, signals: SignalState, *, job_end: float | None) -> None:
        self.signals, self.job_end = signals, job_end
        self.is_pruned = False
        self._given_seconds = job_end - time.time() if job_end else 0.0
        self._last_stop_time = time.monotonic()
        self._longest_gap_seconds = 0.0

    def record_stop_opportunity(self) -> None:
        """Record that the run could stop now, to know how long it takes at most until it can."""
        now = time.monotonic()
        self._longest_gap_seconds = max(self._longest_gap_seconds, now - self._last_stop_time)
        self._last_stop_time = now

    def reason_between_steps(self, *, is_global_zero: bool, save_seconds: float) -> int:
        """Return the index of the reason to stop between two steps; 0: none."""
        if self.is_pruned:
            return REASONS.index(PRUNED)
        return self.reason_within_evaluation(is_global_zero=is_global_zero, save_seconds=save_seconds)

    def reason_within_evaluation(self, *, is_global_zero: bool, save_seconds: float) -> int:
        """Return the index of the reason to stop within an evaluation; 0: none.

        Args:
            save_seconds: how long a save takes.
        """
        if self.signals.signal:
            return REASONS.index(self.signals.signal)
        if not (self.job_end and is_global_zero):  # one clock decides
            return 0
        margin = 2 * save_seconds + 2 * self._longest_gap_seconds + SPARE_SECONDS
        is_over = time.time() > self.job_end - min(margin, self._given_seconds / 3)
        return REASONS.index(JOB_END) if is_over else 0


def end_attempt(
    run: Attempt,
    trainer: L.Trainer,
    agreement: Agreement,
    *,
    step: int,
    outcome: str,
    why: str,
    metrics: Mapping[str, float] | None = None,
) -> NoReturn:
    """Record the end of the attempt, and raise `Stopped` on every rank.

    Args:
        agreement: of all ranks, which wait for each other: a launcher may end all of them when the first one exits.
        step: the last optimizer step that is not lost.
        outcome: continue, failed, or finished: a run that its search ends early has a result all the same.
        metrics: of what was done so far.
    """
    if trainer.is_global_zero:
        attempt_log.record_end(
            run.run_dir, run.claim, attempt=run.number, step=step, outcome=outcome, why=why, metrics=metrics,
            validated=run.validation_metrics,
        )  # fmt: skip
    if outcome == "finished":
        hyperparameters.log_result(trainer, run.cfg, metrics=run.validation_metrics)
    agreement.barrier()
    raise Stopped(step, why, outcome)
