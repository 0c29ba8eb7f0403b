"""The callback that stops, saves and resumes a run: between two optimizer steps, and on all ranks alike."""

from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from hpc.checkpoint import plain_data
from hpc.checkpoint.strategy_state import RANK_STATE
from hpc.config.layout import derive_layout
from hpc.data import sample_randomness
from hpc.data.loader_agreement import reject_differing_orders
from hpc.data.loader_making import LoaderMaking
from hpc.data.position import describe_batch_size
from hpc.resume import continuation, training_end, unsupported
from hpc.resume.continuation import Continuation
from hpc.resume.evaluation_hooks import StopsEvaluations
from hpc.resume.initial_values import InitialValues
from hpc.resume.saving import Saver, validation_metric_names
from hpc.resume.step_boundary import StepBoundary
from hpc.resume.stopping import ReportsTrial
from hpc.run import skipped_samples
from hpc.state.batch_effects import BatchEffects
from hpc.state.holder_fields import SKIPS_NOT_FINITE
from hpc.strategies import sharded_tensors
from hpc.strategies.ddp import DDP, rebuild_ddp_buckets
from hpc.strategies.gradients import require_clip_gradients
from hpc.strategies.synced_buffers import SyncsBuffers
from hpc.training import record, weight_averaging
from hpc.training.attempt import Attempt


class Resume(StopsEvaluations):
    """Save and stop by agreement of all ranks, and restore what Lightning does not.

    It acts when a batch has been fetched and not yet been used: by then the step before it is complete, with what
    follows a step (validation, logging, the end of an epoch). Within a gradient accumulation it waits. Within a
    validation and the like a run stops, too, but nothing is saved there (evaluation_stop.py).

    Args:
        trial: on rank 0, what a run of a search reports to.
    """

    def __init__(self, run: Attempt, *, trial: ReportsTrial | None = None) -> None:
        self.run, self.trial = run, trial
        self.watch, self.signals = run.watch, run.process.signals
        self.settings = run.cfg.checkpoint
        self.faults = run.cfg.faults
        self.saver = Saver(run, self.settings, hang_seconds=60 * self.faults.hang_minutes)
        self.best = self.saver.best
        self.initial = InitialValues()
        self._has_trained = False
        self._weight_names: set[str] = set()
        self._num_validations = 0
        self._validation_metrics: set[str] = set()  # names of all that validations have logged so far
        self._continuation: Continuation | None = None  # until the first batch is there

    # Lightning's hooks of a fit, in the order in which it calls them

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            weight_averaging.reject_unsupported_averaging(trainer, pl_module)
            unsupported.reject_unsupported_callbacks(trainer)
            unsupported.check_model_checkpoints(trainer, self.run.run_dir)
            if self.faults.nonfinite == "skip":
                require_clip_gradients(pl_module)
            weight_averaging.convert_to_float64_before_copy(trainer, pl_module)
        if stage == "fit" or not hasattr(self, "boundary"):  # a test uses that of the fit before it
            self.boundary: StepBoundary = StepBoundary(
                trainer, self.run, saver=self.saver, faults=self.faults, trial=self.trial
            )
        if stage == "fit":
            self._loader_making, self._batch_effects = LoaderMaking(trainer, self.initial), BatchEffects(trainer)
            trainer.strategy.batch_effects = self._batch_effects  # type: ignore[attr-defined]
            trainer.strategy.writer.claim = self.run.claim  # type: ignore[attr-defined]
            # Lightning would ask all ranks at every step whether one got SIGTERM, and hide what goes wrong with that.
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
            setattr(pl_module, SKIPS_NOT_FINITE, self.faults.nonfinite == "skip")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.initial.given(trainer, pl_module)
        self._weight_names = unsupported.weight_names(trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.signals.install_handlers()  # again: Lightning has put its own there, which talk to the other ranks

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.watch.report_progress(trainer.global_step, "starting")
        self.signals.install_handlers()  # there may have been no sanity check
        self.signals.set_interruptible(True)
        rebuild_ddp_buckets(trainer, pl_module)
        if trainer.is_global_zero:
            print(describe_batch_size(trainer, configured=derive_layout(self.run.cfg).micro_batch_size), flush=True)
        unsupported.reject_unsupported_trainer(trainer)
        unsupported.reject_early_stopping_before_validation(
            trainer, set() if self._continuation else self._validation_metrics
        )
        if not is_overridden("validation_step", pl_module):
            self.best.reject_monitor_without_validation(type(pl_module).__name__)
        plain_data.rehearse_save(trainer, pl_module, self)
        self._has_trained = True
        self.saver.begin_training(trainer)
        if self._continuation:
            weight_averaging.reject_resume_from_averaged(self.saver.is_averaged)
            progress = trainer.global_step, "passing over batches that are done"
            self._continuation.on_train_start(trainer, pl_module, lambda: self.watch.report_progress(*progress))
            weight_averaging.resume_averaging(trainer, pl_module)
            after_start = partial(self._continuation.after_train_start, trainer, pl_module)
            trainer.strategy.after_train_start = after_start  # type: ignore[attr-defined]
        self.boundary.agreement.restart()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.initial.begin_training(trainer, pl_module)
        if self._continuation:
            self._continuation.on_epoch_start(trainer, pl_module, made=self._loader_making.changed)
        sample_randomness.watch_fetches(trainer.train_dataloader, self._batch_effects.watch)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.watch.report_progress(trainer.global_step, "training")
        if batch_idx == 0 or not self.run.has_started_training:
            reject_differing_orders(trainer.train_dataloader, self.boundary.agreement.group, split="train")
            unsupported.reject_changed_names(trainer, self._weight_names)
        if not self.run.has_started_training:
            self.run.begin_training()
        self.initial.begin_training(trainer, pl_module)
        if self._continuation:
            self._continuation.on_first_batch(trainer, pl_module, made=self._loader_making.changed)
            self._continuation = None
        if batch_idx % trainer.accumulate_grad_batches == 0:
            if isinstance(trainer.strategy, SyncsBuffers):
                trainer.strategy.before_step()
            self.boundary.save_or_stop_if_due()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *batch: Any, **number: Any
    ) -> None:
        self.boundary.nonfinite.update(outputs)
        trainer.strategy.share = 1.0  # type: ignore[attr-defined]  # the module may call backward between two steps

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.saver.has_new_metrics:
            self.saver.validated_average = weight_averaging.copy_average_before_update(trainer)
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # `max_steps` ends training within an epoch. With more steps a run would resume there, so what is saved must
            # not count this as the end of an epoch. The checkpoint is not published before the values of the epoch are
            # logged: a run that is killed here repeats a few steps, as Lightning ends no epoch that has no step left.
            trainer.strategy.writer.defer_writes()  # type: ignore[attr-defined]
            self.boundary.save_or_stop_if_due(is_last=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            record.record_training_end(trainer, self.run.number)
        trainer.strategy.writer.start_deferred_write()  # type: ignore[attr-defined]
        self.boundary.save_or_stop_if_due(is_last=True)
        self.saver.save_average(trainer, pl_module, has_trained=self._has_trained)
        trainer.strategy.after_train_end = training_end.make_weight_change_reporter(trainer, pl_module)  # type: ignore[attr-defined]
        self.saver.wait_or_raise(trainer)  # a run without its last checkpoint is not finished
        self.signals.set_interruptible(False)
        if self.trial and self.best.value is not None:
            self.trial.end("complete", self.best.value)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._continuation or self._has_trained:
            return
        self._continuation.on_training_already_complete(
            trainer, pl_module
        )  # the run was stopped in its test, for example
        if not self.saver.is_averaged:
            self.saver.save_average(trainer, pl_module, has_trained=self._has_trained)
            self.saver.wait_or_raise(trainer)
        training_end.call_on_train_end(trainer, pl_module)

    # What ends a validation or a run; evaluation_hooks.py has the other hooks of evaluations

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._validation_metrics |= validation_metric_names(trainer)
        names = metrics.keys() | (self._validation_metrics if trainer.sanity_checking else set())
        self.best.reject_unknown_monitor(names, shown=self._validation_metrics)
        self.boundary.validation_clock.update(trainer)
        self.boundary.agreement.restart()
        if trainer.sanity_checking:
            return
        self.best.note_differing_metric(metrics, self.boundary.agreement.group)
        monitor = self.settings.monitor
        validated = self._validation_metrics | ({monitor} if monitor else set())
        self.run.validation_metrics = {name: value for name, value in metrics.items() if name in validated}
        self.saver.has_new_metrics = bool(monitor)
        if self.trial and monitor:
            self.boundary.reasons.is_pruned = self.trial.report(self._num_validations, metrics[monitor])
        self._num_validations += 1

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        sharded_tensors.explain(exception)
        self.watch.report_failure(exception)  # at once: what follows may wait for ranks that are gone

    # The state of a run

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint |= continuation.state_to_save(trainer, pl_module, initial=self.initial)
        if isinstance(trainer.strategy, DDP):
            checkpoint["ddp"] = trainer.strategy.state_to_save()
        checkpoint[RANK_STATE]["made_loaders"] = self._loader_making.state()
        if trainer.is_global_zero:
            self._batch_effects.print_names(self.initial.named_unsaved)
        self.saver.add_to_checkpoint(trainer, checkpoint)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        trainer.num_sanity_val_steps = 0  # Lightning would make a sanity check where a run resumes between two epochs
        weight_averaging.reject_missing_callback(trainer, checkpoint)
        unsupported.reject_paths_outside(checkpoint)
        position, self.saver.is_averaged = checkpoint["position"], checkpoint["averaged"]
        if isinstance(trainer.strategy, DDP):  # an earlier version saved only which parameters are unused
            trainer.strategy.load_state(checkpoint.get("ddp") or {"unused": checkpoint.get("unused")})
        num_skipped = skipped_samples.num_skipped_batches(
            self.run.run_dir, position["stepped"], attempt=checkpoint["attempt"]
        )
        self._continuation = Continuation(trainer, checkpoint, num_skipped=num_skipped, initial=self.initial)
        self._loader_making.again = self._continuation.loader_notes(trainer)
        self.saver.saved_step = checkpoint["global_step"]
        state = checkpoint["callbacks"][self.state_key]
        if self.best.has_other_criterion(state) and state.get("shown"):  # no sanity check will show the metrics
            self.best.reject_unknown_monitor(set(state["shown"]), shown=set(state["shown"]))
        trainer.should_stop = position["stopped_early"]
        if trainer.is_global_zero:  # it decides what the best checkpoint is
            if trainer.should_stop:
                print("note: a callback has stopped this run early, so it does not train any further", flush=True)
            self.best.settle_links(self._continuation.folder, state)

    def state_dict(self) -> dict[str, Any]:
        state = self.best.state() | {"metrics": self.run.validation_metrics, "shown": sorted(self._validation_metrics)}
        return state | {"validations": self._num_validations, "long": self.boundary.validation_clock.is_long}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best.load_state(state_dict)
        self.run.validation_metrics = state_dict["metrics"]
        self._validation_metrics = set(state_dict.get("shown", ()))
        self._num_validations = state_dict.get("validations", 0)
        self.boundary.validation_clock.is_long = state_dict.get("long")
