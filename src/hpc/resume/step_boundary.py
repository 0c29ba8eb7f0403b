"""Between two optimizer steps, all ranks agree on whether to save and whether to stop, and do it."""

from collections.abc import Callable, Mapping

import lightning as L

from hpc.config.sections import FaultsConfig
from hpc.privates import lightning as privates
from hpc.resume import rank_comparison
from hpc.resume.agreement import Agreement, RankRequest
from hpc.resume.evaluation_stop import ValidationClock, is_validation_next
from hpc.resume.nonfinite import NonFiniteCheck
from hpc.resume.saving import Saver
from hpc.resume.stopping import PRUNED, REASONS, ReportsTrial, StopReasons, end_attempt
from hpc.run import skipped_samples
from hpc.training.attempt import Attempt

FIRST_AGREEMENTS = 3  # at which ranks compare their weights, as later only before they save: it waits for the device


class StepBoundary:
    """The decisions of this rank, and the agreements with the other ranks.

    Args:
        trial: on rank 0, what a run of a search reports to.

    Attributes:
        reasons: why this rank wants to stop.
        nonfinite: collects NaN or infinite losses.
        agreement: of all ranks, between two optimizer steps, and at the batches of an evaluation.
        validation_clock: whether a stop would wait for the end of a validation.
        is_saved_before_evaluation: whether the evaluation that runs now may be stopped, to be repeated as a whole.
    """

    def __init__(
        self, trainer: L.Trainer, run: Attempt, *, saver: Saver, faults: FaultsConfig, trial: ReportsTrial | None
    ) -> None:
        self.trainer, self.run, self.saver, self.faults, self.trial = trainer, run, saver, faults, trial
        self.reasons = StopReasons(run.process.signals, job_end=run.job_end)
        self.nonfinite = NonFiniteCheck(is_skipping=faults.nonfinite == "skip")
        self.agreement = Agreement(lambda: bool(self._step_reason()))
        self.validation_clock = ValidationClock()
        self.is_saved_before_evaluation = False
        self._num_agreements = 0
        run.watch.add_store_exchange(self.agreement.early.exchange)
        if meeting := getattr(trainer.strategy, "meeting", None):
            run.watch.add_store_exchange(meeting.exchange)

    def save_or_stop_if_due(self, *, is_last: bool = False) -> None:
        """Agree, save and stop, as far as it is due.

        Args:
            is_last: no step follows in this training, or in this part of it.

        Raises:
            Stopped: on all ranks.
            ConfigError: the ranks have different learning rates or weights, or used different parts under FSDP.
        """
        trainer, saver = self.trainer, self.saver
        step = trainer.global_step
        self.reasons.record_stop_opportunity()
        self.is_saved_before_evaluation = False
        is_before_validation, is_due = not is_last and is_validation_next(trainer), saver.is_step_due(step)
        is_needed = is_due or is_last or is_before_validation or saver.has_new_metrics
        if not self.agreement.is_due(is_needed=is_needed):
            return
        if saver.has_new_metrics and not trainer.strategy.is_writing:  # type: ignore[attr-defined]
            saver.wait_or_warn(trainer)  # so that the best checkpoint so far is known to be on the disk
        request = RankRequest(
            stop=self._step_reason(),
            save=is_due or is_last or (trainer.is_global_zero and saver.is_time_due(trainer)),
            is_best=trainer.is_global_zero and saver.is_new_best(),
            is_not_finite=self.nonfinite.compute_and_reset(trainer, trainer.lightning_module),
            save_before_validation=is_before_validation and self.validation_clock.is_long is not False,
        )
        checksum, group = rank_comparison.checksum(trainer, is_last=is_last), self.agreement.group
        agreed = self.agreement.all_reduce_requests(request, checksum=checksum)
        if agreed.ranks_differ:
            rank_comparison.raise_difference(trainer, group)
        saver.has_new_metrics, self.is_saved_before_evaluation = False, bool(agreed.save_before_validation)
        if agreed.is_not_finite:
            self._end_nonfinite(step)
        wants_save = agreed.save or agreed.is_best or agreed.stop or agreed.save_before_validation
        self._num_agreements += 1
        if wants_save or self._num_agreements <= FIRST_AGREEMENTS:
            rank_comparison.reject_different_weights(trainer, group)
        if wants_save and (step != saver.saved_step or agreed.is_best):
            saver.start_save(trainer, step, is_best=bool(agreed.is_best))
        if agreed.stop and not is_last:
            saver.wait_or_warn(trainer)
            why = REASONS[agreed.stop]
            self._end(step, outcome="finished" if why == PRUNED else "continue", why=why)

    def begin_evaluation(self) -> None:
        """Start the clock, and let the ranks agree at the first batch."""
        self.validation_clock.begin()
        self.agreement.restart()

    def stop_evaluation_if_due(self, *before_stop: Callable[[], dict[str, float]]) -> None:
        """Stop here, if all ranks do, where only this evaluation and one step are lost since the last checkpoint.

        Args:
            before_stop: write results so far, on all ranks, and return metrics of them.

        Raises:
            Stopped: on all ranks.
        """
        is_separate = self.trainer.sanity_checking or self.trainer.testing or self.trainer.predicting
        if not (self.is_saved_before_evaluation or is_separate):
            return
        self.reasons.record_stop_opportunity()
        if not self.agreement.is_due():
            return
        if reason := self.agreement.all_reduce_requests(RankRequest(stop=self._evaluation_reason())).stop:
            self.saver.wait_or_warn(self.trainer)
            metrics = {name: value for write in before_stop for name, value in write().items()}
            self._end(self.saver.saved_step, outcome="continue", why=REASONS[reason], metrics=metrics)

    def _step_reason(self) -> int:
        return self.reasons.reason_between_steps(
            is_global_zero=self.trainer.is_global_zero, save_seconds=self.saver.save_seconds
        )

    def _evaluation_reason(self) -> int:
        return self.reasons.reason_within_evaluation(
            is_global_zero=self.trainer.is_global_zero, save_seconds=self.saver.save_seconds
        )

    def _end_nonfinite(self, step: int) -> None:
        """End the attempt before anything is saved: a loss or gradient was NaN or infinite, perhaps some steps ago."""
        self.saver.wait_or_warn(self.trainer)
        why = f"loss or gradient was not finite, seen at step {step}"
        if self.faults.nonfinite == "rollback" and self.saver.saved_step:  # without a checkpoint there is no way back
            if self.trainer.is_global_zero:
                num_steps = privates.logged_step(self.trainer)  # `step` counts all optimizers'
                skipped_samples.record_skip(self.run.run_dir, num_steps, attempt=self.run.number)
            self._end(step, outcome="continue", why=f"{why}: back to the last checkpoint, past these samples")
        self._end(step, outcome="failed", why=why)

    def _end(self, step: int, *, outcome: str, why: str, metrics: Mapping[str, float] | None = None) -> None:
        if self.trainer.is_global_zero and self.trial and outcome == "finished":
            self.trial.end("pruned")
        end_attempt(self.run, self.trainer, self.agreement, step=step, outcome=outcome, why=why, metrics=metrics)
