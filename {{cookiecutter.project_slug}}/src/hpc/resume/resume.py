"""Where a run stops and where it goes on: between two optimizer steps, on all ranks alike."""

import math
import time
from collections.abc import Set
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import lightning as L
import torch
from torch import Tensor

from hpc.checkpoint import on_disk, plain_data
from hpc.checkpoint.strategy_state import MANIFEST, ON_PUBLISHED, RANK_STATE, VALIDATED_WEIGHTS
from hpc.checkpoint.writer import CheckpointNotWritten
from hpc.config.conversion import to_dataclass
from hpc.config.errors import ConfigError
from hpc.config.sections import CheckpointConfig, FaultsConfig
from hpc.data import noted_batches
from hpc.data.loader_randomness import LoaderRandomness
from hpc.data.shared_loaders import reject_differing_orders
from hpc.resume import continuation, schedules, training_end, unsupported
from hpc.resume.agreement import Agreement, Request
from hpc.resume.continuation import Continuation
from hpc.resume.evaluation_stop import EvaluationStop, is_validation_next
from hpc.run import attempt_log, phases
from hpc.run.signals import INTERRUPTED, ORPHANED
from hpc.run.watchdog import Stopped
from hpc.state import attributes, randomness, trainer_settings
from hpc.state.batch_effects import TransferEffects
from hpc.state.holder_fields import SKIPS_NOT_FINITE
from hpc.training import record, skipped_samples, weight_averaging
from hpc.training.attempt import Attempt
from hpc.training.ddp_buckets import settle_buckets
from hpc.training.parallel import last_gradient_norm, reject_unskippable_module
from hpc.training.synced_buffers import SyncsBuffers

PRUNED = "pruned: worse than the median trial"
JOB_END = "the end of the job's time"
# Of several, the last one is what a run stops for.
REASONS = ("", "SIGUSR1", "SIGUSR2", INTERRUPTED, "SIGTERM", ORPHANED, JOB_END, PRUNED)
QUIET_FACTOR = (
    4  # times as long as a step may take, a write may show no sign that it goes on: a disk that is slow to sync
)
ASSUMED_SAVE_SECONDS = 60.0  # seconds that a save is assumed to take before one was seen


class Trial(Protocol):
    """What a run tells the search that it belongs to."""

    def report(self, number: int, value: float) -> bool:
        """Tell the metric of a validation, counted from 0. Return whether the run is to be given up."""
        ...

    def end(self, outcome: str, value: float | None = None) -> None:
        """Tell the outcome: complete, which has a value; pruned; fail."""
        ...


class Resume(L.Callback):
    """Saves, stops by agreement, and restores what Lightning does not.

    All of it happens when a batch is fetched and nothing is done with it: then the step before it, and what follows a
    step (validation, logging, the end of an epoch), lie behind. In the middle of a gradient accumulation it waits.
    Within a validation and the like it stops, too, but saves nothing there (redone.py).

    Args:
        trial: on rank 0, what a run of a search reports to.
    """

    def __init__(self, run: Attempt, *, trial: Trial | None = None) -> None:
        self.run, self.trial = run, trial
        self.run_dir, self.watch, self.warned = run.run_dir, run.watch, run.program.signals
        self.when = to_dataclass(CheckpointConfig, run.cfg.checkpoint, name="checkpoint")
        self.faults = to_dataclass(FaultsConfig, run.cfg.faults, name="faults")
        self.best: float | None = None
        self.best_folder: str | None = None
        self._best_written: tuple[float | None, str | None] = None, None  # the same, of what best.ckpt leads to
        self._saved_step = 0  # what holds nothing but a beginning is not saved
        self._redo = False  # was this step saved before it began, for what follows and is redone after a stop?
        self._saved_at = self._passed_at = time.monotonic()
        self._longest = 0.0  # seconds between two places where a run can stop
        self._save_seconds = ASSUMED_SAVE_SECONDS
        self._saves = self._validated = self._given_up = self._trained = self._takes_statistics = False
        self._average: dict[str, Tensor] | None = None  # that was validated, where it has changed since
        self._names: set[str] = set()  # of weights
        self._updates = 0  # of averages, when last saved
        self._averaged = False  # are the weights those of the end, put in place of the last ones?
        self._validations = 0
        self._shown: set[str] = set()  # metrics that validation has logged so far
        self._continuation: Continuation | None = None  # till it has gone on
        self._built: attributes.InitialAttributes | None = None
        self._was_set: trainer_settings.InitialSettings = {}
        self._first: attributes.InitialAttributes | None = None  # before hooks of the fit were called
        self._before_check: attributes.InitialAttributes = {}  # of sanity
        self._checked: set[attributes.Place] = set()  # what that check has changed: a run that goes on makes none
        self._began: Any = None  # random state with which the module's own on_train_start was called
        self._not_finite: Tensor | None = None
        self._time_given = run.job_end - time.time() if run.job_end else 0.0

    # What Lightning calls

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            weight_averaging.reject_unsupported(trainer)
            unsupported.reject_unsupported_callbacks(trainer)
            if self.faults.nonfinite == "skip":
                reject_unskippable_module(pl_module)
            weight_averaging.convert_before_copy(trainer, pl_module)
        if stage == "fit" or not hasattr(self, "redone"):  # a test has those of its training
            self.agreement = Agreement(wanted=lambda: bool(self._reason(trainer.is_global_zero)))
            self.redone = EvaluationStop(self.agreement, lambda: self._told_to_stop(trainer.is_global_zero))
            turns = self.agreement.early.turn, self.redone.agreement.early.turn
            self.watch.exchange_with(lambda store: [turn(store) for turn in turns])
        if stage == "fit":
            self._loaders, self._transferred = LoaderRandomness(trainer), TransferEffects(trainer)
            trainer.strategy.writer.claim = self.run.claim  # type: ignore[attr-defined]
            # Lightning asks all ranks at every step whether one got SIGTERM, and hides what goes wrong with that.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
            setattr(pl_module, SKIPS_NOT_FINITE, self.faults.nonfinite == "skip")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        unsupported.reject_lazy_layers(pl_module)
        self._first = attributes.record_initial(trainer, pl_module)
        self._names = unsupported.weight_names(trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.warned.install_handlers()  # again: Lightning puts its own there, which talks to the other ranks
        self._before_check = attributes.record_initial(trainer, pl_module)

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        now = attributes.record_initial(trainer, pl_module)
        self._checked = {place for place in now if now[place] != self._before_check.get(place)}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.watch.report_progress(trainer.global_step, "starting")
        self.warned.install_handlers()  # where there was no sanity check
        self.warned.set_interruptible(True)
        settle_buckets(trainer, pl_module)
        unsupported.reject_unsupported(trainer)
        unsupported.reject_unvalidated(trainer, set() if self._continuation else self._shown)
        plain_data.rehearse_save(trainer, pl_module, self)
        self._trained, self._updates = True, weight_averaging.num_updates(trainer)
        if self._continuation:
            weight_averaging.reject_averaged_weights(self._averaged)
            said = trainer.global_step, "passing over batches that are done"
            self._continuation.on_train_start(trainer, pl_module, lambda: self.watch.report_progress(*said))
            weight_averaging.resume_averaging(trainer, pl_module)
        self.agreement.next_step = trainer.global_step
        began = self._continuation.began if self._continuation else None
        self._began = began or randomness.plain_state()
        if began:
            continuation.repeat_draws_of_start(began, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note_built(trainer, pl_module)
        if self._continuation:
            self._continuation.on_epoch_start(trainer, pl_module)
        if weight_averaging.is_statistics_epoch(trainer):
            self._between_steps(trainer, pl_module, last=True)  # this epoch puts the average in place
            self._takes_statistics = self._redo = True
            self.redone.begin()
            pl_module.zero_grad()  # Lightning ends it with a step of the optimizer, with the gradients that are left
            trainer.gradient_clip_val = None  # torch does not cut the values of no gradients
        if (
            noted_batches.note_batches(trainer) and trainer.current_epoch == 0
        ):  # iterators of other epochs are made after this
            iter(trainer.fit_loop._data_fetcher)  # type: ignore[call-overload]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.watch.report_progress(trainer.global_step, "training")
        if batch_idx == 0 or not self.run.trains:
            reject_differing_orders(trainer.train_dataloader, self.agreement.group)
            unsupported.reject_changed_names(trainer, self._names)
        self.run.trains = True
        self._note_built(trainer, pl_module)
        if self._continuation:
            self._continuation.on_first_batch(trainer, pl_module)
            self._continuation = None
        if self._takes_statistics:
            self._within_redone(trainer)
        elif batch_idx % trainer.accumulate_grad_batches == 0:
            if isinstance(trainer.strategy, SyncsBuffers):
                trainer.strategy.before_step()
            self._between_steps(trainer, pl_module)

    def _note_built(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Once, and after the module's own `on_train_start`, which may depend on how long this training is."""
        if self._built is None:
            set_since = self._transferred.initial | self._continuation.built if self._continuation else {}
            built = attributes.record_initial(trainer, module, before=self._first)
            self._built = {place: built[place] for place in built.keys() - self._checked} | set_since
            self._was_set = trainer_settings.record_initial(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *batch: Any, **number: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None  # a training_step may return none
        if isinstance(loss, Tensor) and self.faults.nonfinite != "skip":
            bad = ~torch.isfinite(loss).all() if loss.ndim else ~torch.isfinite(loss)
            self._not_finite = bad if self._not_finite is None else self._not_finite | bad

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.redone.begin()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            reject_differing_orders(trainer.val_dataloaders, self.agreement.group)
        self._within_redone(trainer)

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            reject_differing_orders(trainer.test_dataloaders, self.agreement.group)
        self._within_redone(trainer)

    def on_validation_batch_end(self, trainer: L.Trainer, *batch: Any, **number: Any) -> None:
        self.watch.report_progress(trainer.global_step, "validating")

    def on_test_batch_end(self, trainer: L.Trainer, *batch: Any, **number: Any) -> None:
        self.watch.report_progress(trainer.global_step, "testing")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._shown |= validation_metric_names(trainer)
        self._reject_monitor(metrics.keys() | (self._shown if trainer.sanity_checking else set()))
        self.redone.validated(trainer)
        if trainer.sanity_checking:
            return
        self.run.validation_metrics, self._validated = metrics, bool(self.when.monitor)
        if self.trial and self.when.monitor:
            self._given_up = self.trial.report(self._validations, metrics[self.when.monitor])
        self._validations += 1

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.warned.install_handlers()
        self.redone.begin()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.watch.report_failure(exception)  # at once: what follows may wait for ranks that are gone

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._validated:
            self._average = weight_averaging.copy_average_before_update(trainer)
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # `max_steps` ends the run within an epoch. With more steps it goes on there, so this is no end of an epoch
            # to what is saved. Nor does that count before its values are logged: a run that is struck here does a few
            # steps again, as Lightning ends no epoch of which nothing is left to do.
            trainer.strategy.writer.hold()  # type: ignore[attr-defined]
            self._between_steps(trainer, pl_module, last=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            record.record_training_end(trainer, self.run.number)
        trainer.strategy.writer.release()  # type: ignore[attr-defined]
        if not self._takes_statistics:
            self._between_steps(trainer, pl_module, last=True)
        self._end_averaging(trainer, pl_module)
        trainer.strategy.after_train_end = training_end.report_changed_weights(trainer, pl_module)  # type: ignore[attr-defined]
        self._wait(trainer)  # without its end a run is not finished
        self.warned.set_interruptible(False)
        if self.trial:
            self.trial.end("fail" if self.best is None else "complete", self.best)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._continuation or self._trained:
            return
        self._continuation.on_nothing_left(trainer, pl_module)  # it was stopped in the test, say
        if not self._averaged:
            self._end_averaging(trainer, pl_module)
            self._wait(trainer)
        training_end.call_on_train_end(trainer, pl_module)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint |= continuation.state_to_save(trainer, pl_module, self._built or {}, self._was_set, self._began)
        checkpoint[RANK_STATE]["made_loaders"] = self._loaders.state()
        is_fetched = checkpoint["position"]["is_fetched"]
        checkpoint[RANK_STATE]["transferred"] = self._transferred.state() if is_fetched else None
        checkpoint["attempt"] = self.run.number
        checkpoint["averaged"] = self._averaged
        checkpoint[MANIFEST] = {"step": trainer.global_step, "attempt": self.run.number, "epoch": trainer.current_epoch}
        # As curves are numbered: `step` counts the steps of all optimizers.
        checkpoint[MANIFEST]["stepped"] = trainer.fit_loop.epoch_loop._batches_that_stepped
        checkpoint[MANIFEST]["batches"] = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        checkpoint[MANIFEST]["averaged"] = checkpoint["averaged"]
        # For good, by a callback. One that looks as an epoch ends may say so only because `max_steps` ended that one.
        checkpoint[MANIFEST]["stopped_early"] = trainer.should_stop and trainer.fit_loop._can_stop_early
        if self._saves:
            checkpoint[ON_PUBLISHED] = partial(self._tidy, best=self.best_folder)
        else:  # one that the researcher asks for, in a folder where nothing is ours
            self._written(trainer)
        if self._average is not None:
            checkpoint[VALIDATED_WEIGHTS] = self._average
        if trainer.is_global_zero:
            checkpoint[MANIFEST]["logs"] = record.flush_logs(trainer)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        trainer.num_sanity_val_steps = 0  # Lightning would make one where a run goes on between two epochs
        weight_averaging.reject_missing_callback(trainer, checkpoint)
        place, self._averaged = checkpoint["position"], checkpoint["averaged"]
        skipped = skipped_samples.num_skipped_batches(self.run_dir, place["stepped"], attempt=checkpoint["attempt"])
        self._continuation = Continuation(trainer, checkpoint, skipped)
        self._loaders.again = self._continuation.made_loaders(trainer)
        self._transferred.to_restore = self._continuation.transferred()
        trainer.strategy.evaluation = self._continuation.evaluation()  # type: ignore[attr-defined]
        self._saved_step = checkpoint["global_step"]
        state = checkpoint["callbacks"][self.state_key]
        if self._goes_by_another(state) and state.get("shown"):  # at once: no sanity check tells it
            self._reject_monitor(set(state["shown"]))
        trainer.should_stop = place["stopped_early"]
        if trainer.is_global_zero:  # it decides what the best is
            if trainer.should_stop:
                print("note: this run was stopped early, by a callback: it does not train any further", flush=True)
            self._settle(Path(str(trainer.ckpt_path)), state)

    def state_dict(self) -> dict[str, Any]:
        kept = {"best": self.best, "best_folder": self.best_folder, "metrics": self.run.validation_metrics}
        kept |= {"monitor": self.when.monitor, "mode": self.when.mode, "shown": sorted(self._shown)}
        return kept | {"validations": self._validations, "long": self.redone.long}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.best_folder = state_dict["best"], state_dict["best_folder"]
        self.run.validation_metrics = state_dict["metrics"]
        if self._goes_by_another(state_dict):
            self.best = None  # nothing to compare with; best.ckpt stays till a validation names a new one
        self._shown = set(state_dict.get("shown", ()))
        self._validations, self.redone.long = state_dict.get("validations", 0), state_dict.get("long")
        self._best_written = self.best, self.best_folder

    # Between two steps

    def _between_steps(self, trainer: L.Trainer, pl_module: L.LightningModule, last: bool = False) -> None:
        step, now = trainer.global_step, time.monotonic()
        self._pass(now)
        self._redo = False
        follows = not last and is_validation_next(trainer)
        every = self.when.every_n_steps  # several optimizers make several steps at once
        due = bool(every) and step // (every or 1) > self._saved_step // (every or 1)
        if not (due or last or follows or self._validated or self.agreement.due(step)):
            return
        if self._validated and not trainer.strategy.is_writing:  # type: ignore[attr-defined]
            self._written(trainer)  # is the best so far on the disk?
        mine = Request(
            stop=self._reason(trainer.is_global_zero),
            save=due or last or (trainer.is_global_zero and self._minutes_are_over(trainer, now)),
            best=trainer.is_global_zero and self._is_best(),
            not_finite=self._is_not_finite(trainer, pl_module),
            redo=follows and self.redone.long is not False,
        )
        wish = self.agreement.ask(step, mine, 0 if last else schedules.learning_rate_checksum(trainer.optimizers))
        if wish.apart:
            schedules.reject_differing_rates(trainer)
        self._validated, self._redo = False, bool(wish.redo)
        if wish.not_finite:
            self._give_up(trainer, step)
        if (wish.save or wish.best or wish.stop or wish.redo) and (step != self._saved_step or wish.best):
            self._save(trainer, step, is_best=bool(wish.best))
        if wish.stop and not last:
            self._written(trainer)
            why = REASONS[wish.stop]
            self._leave(trainer, step, "finished" if why == PRUNED else "continue", why)

    def _pass(self, now: float) -> None:
        """Here the run can stop."""
        self._longest, self._passed_at = max(self._longest, now - self._passed_at), now

    def _within_redone(self, trainer: L.Trainer) -> None:
        """Stop here, if all ranks do, where nothing but this and one step is done since the last checkpoint."""
        if not (self._redo or trainer.sanity_checking or trainer.testing):
            return
        self._pass(time.monotonic())
        if reason := self.redone.stop():
            self._written(trainer)
            self._leave(trainer, self._saved_step, "continue", REASONS[reason])

    def _save(self, trainer: L.Trainer, step: int, is_best: bool, averaged: bool = False) -> None:
        begin = time.time()
        self._written(trainer)
        final = on_disk.checkpoint_path(self.run_dir, step, averaged=averaged)
        if is_best:
            self.best, self.best_folder = self.run.validation_metrics[self.when.monitor or ""], final.name
        else:
            self._average = None
        self._saves = True
        try:
            trainer.save_checkpoint(final, weights_only=False)
        except CheckpointNotWritten as error:
            self._warn(trainer, step, error)
        finally:
            self._saves = False
        self._saved_step, self._saved_at = step, time.monotonic()
        self._average, self._updates = None, weight_averaging.num_updates(trainer) if self._average is None else -1
        if trainer.is_global_zero:
            phases.record_phase(self.run_dir, self.run.number, kind="checkpoint", begin_time=begin, step=step)

    def _written(self, trainer: L.Trainer) -> None:
        """Wait for the checkpoint that is being written. One that failed is reported; those before it are there."""
        writer: Any = trainer.strategy.writer  # type: ignore[attr-defined]
        try:
            self._wait(trainer)
            self._save_seconds = writer.seconds or self._save_seconds
            self.watch.has_saved |= bool(writer.seconds)
            self._best_written = self.best, self.best_folder
        except CheckpointNotWritten as error:
            self._warn(trainer, self._saved_step, error)

    def _wait(self, trainer: L.Trainer) -> None:
        """Till nothing is being written, however long that takes as long as it goes on. Raises `Unwritten`."""
        step, quiet_since = trainer.global_step, time.monotonic()

        def meanwhile(moves: bool) -> None:
            nonlocal quiet_since
            now = time.monotonic()
            quiet_since = now if moves else quiet_since
            if now - quiet_since < (QUIET_FACTOR - 1) * 60 * self.faults.hang_minutes:
                self.watch.report_progress(step, "waiting for a checkpoint to be written")

        trainer.strategy.writer.wait(meanwhile)  # type: ignore[attr-defined]

    def _warn(self, trainer: L.Trainer, step: int, error: CheckpointNotWritten) -> None:
        self.best, self.best_folder = self._best_written
        if trainer.is_global_zero:
            print(f"warning: the checkpoint of step {step} was not written: {error}", flush=True)

    def _tidy(self, final: Path, best: str | None) -> None:
        """A checkpoint is whole: name it, and remove what it makes superfluous. On the thread that has written it."""
        on_disk.set_link(final.with_name(on_disk.LAST), final)
        if final.name == best:
            on_disk.set_link(final.with_name(on_disk.BEST), final)
        on_disk.prune(final, self.when.keep)

    def _settle(self, found: Path, state: dict[str, Any]) -> None:
        """Let both links lead where this checkpoint's state says. A best one that is gone is the best no more."""
        best = found.with_name(state["best_folder"]) if state["best_folder"] else None
        if not on_disk.settle_links(found, best) and best:
            print(f"warning: the best checkpoint, {best}, is gone; the next validation names a new one", flush=True)
            state.update(best=None, best_folder=None)
        elif best and state["best"] is not None and self._goes_by_another(state):
            follows = f"the next validation names a new one, by {self.when.monitor} ({self.when.mode})"
            follows = follows if self.when.monitor else "with checkpoint.monitor=null there will be no other"
            print(f"note: best.ckpt is the best one by {state['monitor']} ({state['mode']}); {follows}", flush=True)

    def _goes_by_another(self, state: dict[str, Any]) -> bool:
        """Was another metric, or the other extreme of it, what made the best one of a checkpoint?"""
        mine = {"monitor": self.when.monitor, "mode": self.when.mode}
        return mine != {key: state.get(key, value) for key, value in mine.items()}

    def _reject_monitor(self, known: Set[str]) -> None:
        """Raise `ConfigError` where the metric that names the best is not among those that are `known`."""
        if self.when.monitor and self.when.monitor not in known:
            names = ", ".join(sorted(name for name in known if name.startswith("val/"))) or "none"
            rule = f"must be a metric that is logged in validation; there are: {names}"
            raise ConfigError("checkpoint.monitor", self.when.monitor, rule, "one of them, or checkpoint.monitor=null")

    def _end_averaging(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What is tested is saved: an average that has changed, or taken the place of weights, since the last save."""
        changed = self._trained and self._updates != weight_averaging.num_updates(trainer)
        self._averaged = weight_averaging.apply_average(trainer, pl_module, trained=self._trained) or changed
        if self._averaged:
            self._save(trainer, trainer.global_step, is_best=self._is_best(), averaged=True)

    def _leave(self, trainer: L.Trainer, step: int, outcome: str, why: str) -> None:
        if trainer.is_global_zero:
            if self.trial and outcome != "continue":
                self.trial.end("pruned" if outcome == "finished" else "fail")
            attempt_log.record_end(
                self.run_dir, self.run.claim, attempt=self.run.number, step=step, outcome=outcome, why=why
            )
        if outcome == "finished":  # a run that its search ends early has a result all the same
            record.log_result(trainer, self.run.cfg, metrics=self.run.validation_metrics)
        self.agreement.wait()  # till rank 0 has noted it: a launcher may end all ranks when the first one leaves
        raise Stopped(step, why, outcome)

    # What this rank wants

    def _reason(self, is_global_zero: bool) -> int:
        return REASONS.index(PRUNED) if self._given_up else self._told_to_stop(is_global_zero)

    def _told_to_stop(self, is_global_zero: bool) -> int:
        if self.warned.signal:
            return REASONS.index(self.warned.signal)
        if not (self.run.job_end and is_global_zero):  # one clock decides
            return 0
        margin = min(2 * self._save_seconds + 2 * self._longest + 10, self._time_given / 3)
        return REASONS.index(JOB_END) if time.time() > self.run.job_end - margin else 0

    def _minutes_are_over(self, trainer: L.Trainer, now: float) -> bool:
        minutes = self.when.every_minutes
        over = minutes is not None and now - self._saved_at > 60 * minutes
        return over and not trainer.strategy.is_writing  # type: ignore[attr-defined]

    def _is_best(self) -> bool:
        if not (self._validated and self.when.monitor):
            return False
        value, best = self.run.validation_metrics[self.when.monitor], self.best
        return math.isfinite(value) and (best is None or (value < best if self.when.mode == "min" else value > best))

    def _is_not_finite(self, trainer: L.Trainer, pl_module: L.LightningModule) -> bool:
        seen, self._not_finite = self._not_finite, None
        norm = last_gradient_norm(pl_module) if self.faults.nonfinite != "skip" else None
        scaled = trainer.precision == "16-mixed"  # there a norm is often infinite, and the scaler skips that step
        return bool(seen) or (norm is not None and not scaled and not bool(torch.isfinite(norm)))

    def _give_up(self, trainer: L.Trainer, step: int) -> None:
        """Before anything is saved: loss or gradient was no number at this step or a few before."""
        self._written(trainer)
        why = f"loss or gradient was not finite, seen at step {step}"
        if self.faults.nonfinite == "rollback" and self._saved_step:  # else there is nothing to go back to
            stepped = trainer.fit_loop.epoch_loop._batches_that_stepped  # `step` counts those of all optimizers
            skipped_samples.record_skip(
                self.run_dir, stepped, attempt=self.run.number
            ) if trainer.is_global_zero else None
            self._leave(trainer, step, "continue", f"{why}: back to the last checkpoint, past these samples")
        self._leave(trainer, step, "failed", why)


def _logged(trainer: Any) -> set[str]:
    """Metrics of a validation, by name: in a sanity check Lightning does not hand them out."""
    results = trainer._results  # the only place where they are
    epoch = [result for result in results.values() if result.meta.on_epoch]
    return {name for result in epoch for name in results._forked_name(result, on_step=False)}
