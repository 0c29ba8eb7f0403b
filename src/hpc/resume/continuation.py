"""The state from which a run resumes: saved between two steps, restored when training starts and at its first batch."""

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from hpc.checkpoint.strategy_state import RANK_STATE, read_rank_state
from hpc.data import loader_places, position, position_checks, same_data
from hpc.resume import accumulated_gradients, epoch_metrics, schedules
from hpc.resume.initial_values import InitialValues, without_computed
from hpc.state import attributes, randomness, trainer_settings
from hpc.state.batch_effects import OF_DATA, has_transfer_hooks


def state_to_save(trainer: L.Trainer, module: L.LightningModule, *, initial: InitialValues) -> dict[str, Any]:
    """Return what Lightning does not save, for a checkpoint; below `RANK_STATE` what belongs to this rank alone.

    Args:
        initial: attributes and settings are saved that have changed since.
    """
    place = position.current_position(trainer)
    changed, of_start = initial.changed(trainer, module)
    if trainer.is_global_zero:
        attributes.print_unsaved(changed, initial.named_unsaved)
    return {
        "position": place,
        "scheduled": schedules.scheduled_values(trainer.optimizers),
        RANK_STATE: {
            "random": randomness.plain_state(),
            "epoch": epoch_metrics.state(trainer, module),
            "gradients": accumulated_gradients.state(module),
            "attributes": changed,
            "of_start": of_start,
            "settings": trainer_settings.find_changed(trainer, initial.settings),
            "loaders": loader_places.loader_places(
                trainer, is_fetched=place["is_fetched"], between_epochs=place["between_epochs"]
            ),
        },
    }


class Continuation:
    """Restores the result of `state_to_save`.

    Args:
        checkpoint: Lightning's counters in it are changed in place.
        num_skipped: optimizer steps whose samples are left out.

    Attributes:
        folder: the checkpoint's.

    Raises:
        ConfigError: the run cannot resume there in this layout.
    """

    def __init__(
        self, trainer: L.Trainer, checkpoint: dict[str, Any], *, num_skipped: int, initial: InitialValues
    ) -> None:
        self.initial = initial
        self.saved_position, self.scheduled = checkpoint["position"], checkpoint["scheduled"]
        position_checks.reject_earlier_end(trainer, self.saved_position, steps=checkpoint["global_step"])
        self.start = position.set_counters(
            checkpoint["loops"]["fit_loop"],
            self.saved_position,
            accumulate=position.micro_batches_per_step(trainer, self.saved_position["epoch"]),
            skipped=num_skipped,
        )
        self.is_same_world_size = self.saved_position["world_size"] == trainer.world_size
        self.is_same_epoch = self.start.epoch == self.saved_position["epoch"]
        self.folder, self.rank_state = Path(str(trainer.ckpt_path)), checkpoint[RANK_STATE]
        self._is_same_data = True
        self._data_state = checkpoint.get(type(getattr(trainer, "datamodule", None)).__qualname__)
        self._saved_buffers: dict[str, Tensor] = {}
        if not self.is_same_epoch and trainer.is_global_zero:
            skipped = "with its validation, and what schedules and callbacks do there"
            print(f"note: the end of epoch {self.saved_position['epoch']} is left out, {skipped}", flush=True)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule, report: Callable[[], object]) -> None:
        """Move the loaders to the position where the run resumes.

        Args:
            report: called for each batch that is passed over.

        Raises:
            ConfigError: it would not be the same position.
        """
        other_data = same_data.has_changed_data(trainer)
        position_checks.check_position(trainer, self.saved_position, start=self.start, other_data=other_data)
        self._is_same_data = not other_data
        loader_places.prepare_loaders(trainer, self._loader_places())
        position.start_at(trainer, self.start)
        if not self.start.between_epochs:
            loader_places.pass_over_skipped(
                trainer, self._loader_places(), num=self._num_batches_skipped(), tick=report
            )
        if not self._makes_new_loaders(trainer):  # else they were set before loaders were made, which has changed them
            changed = [entry for entry in self._state_of_rank()["attributes"] if entry[0].startswith(OF_DATA)]
            attributes.restore_silently(trainer, module, changed=changed)
        schedules.restore(trainer.optimizers, self.scheduled)
        if self.start.is_fetched and has_transfer_hooks(module):
            names = module.state_dict(keep_vars=True).keys()
            self._saved_buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name in names}
        # If a validation was just done, Lightning counts it by this function, which makes an iterator of its data.
        validation = trainer.fit_loop.epoch_loop.val_loop
        validation.increment_progress_to_evaluation_end = _keep_random_state(  # type: ignore[method-assign]
            validation.increment_progress_to_evaluation_end
        )

    def after_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Restore random numbers, once hooks have drawn theirs and before iterators of loaders draw."""
        if not self.start.is_fetched:
            self._restore(trainer, module)

    def on_epoch_start(self, trainer: L.Trainer, module: L.LightningModule, *, made: Set[attributes.Place]) -> None:
        """Restore attributes and settings, before the module's own `on_train_epoch_start`.

        Args:
            made: places of attributes that the making of training loaders has changed.
        """
        state = self._state_of_rank()
        changed = state["attributes"]
        if self._makes_new_loaders(trainer):
            changed = [entry for entry in changed if tuple(entry[:2]) not in made]
        of_start = {(owner, name) for owner, name in state["of_start"]}
        is_same_plan = self._is_same_plan(trainer)
        changed = without_computed(trainer, module, changed=changed, of_start=of_start, is_same_plan=is_same_plan)
        attributes.restore(trainer, module, changed=changed, is_other_rank=not self.is_same_world_size)
        self.initial.take_over(trainer, module, changed=state["attributes"], of_start=of_start)
        trainer_settings.restore(trainer, state.get("settings", []))

    def on_first_batch(self, trainer: L.Trainer, module: L.LightningModule, *, made: Set[attributes.Place]) -> None:
        """Restore what Lightning has changed since, as it counts one batch too many when it restarts."""
        start, loop = self.start, trainer.fit_loop.epoch_loop
        loop._batches_that_stepped, loop.batch_progress.total.ready = start.stepped, start.num_fetched
        trainer.fit_loop._restarting = False  # else schedules would not look for plateaus at the end of this epoch
        self._restore_saved_state(trainer, module)
        if not start.between_epochs:  # otherwise the epoch begins, with all that belongs to it
            trainer.accumulate_grad_batches = start.micro_batches_per_step
            loader_places.finish_orders(
                trainer, self._loader_places(), is_same=self._is_same_data and self.is_same_world_size
            )
            self.on_epoch_start(trainer, module, made=made)
        # With another world size all ranks take rank 0's gradients, as ranks share what they have averaged.
        accumulated_gradients.restore(module, self._state_of_rank().get("gradients", {}))
        trainer._logger_connector._first_loop_iter = start.batches == 0  # the first batch of an epoch clears its sums
        if start.is_fetched:
            self._restore(trainer, module)

    def loader_notes(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return what `LoaderMaking` noted of loaders that are still the same at this position."""
        notes = self._state_of_rank().get("made_loaders", {})
        if self._makes_new_loaders(trainer):
            new = {"changed": self._state_of_rank()["attributes"], "epoch": self.start.epoch, "is_new": True}
            return notes | {"train": new}
        return notes

    def on_training_already_complete(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Restore what callbacks and the test would see right after the last step, if all steps were done before."""
        state = self._state_of_rank()
        epoch_metrics.restore_shown_metrics(trainer, state["epoch"])
        attributes.restore(trainer, module, changed=state.get("attributes", []))
        last_epoch = self.start.epoch - self.start.between_epochs
        trainer.accumulate_grad_batches = position.micro_batches_per_step(trainer, last_epoch)
        if not self.start.between_epochs:
            trainer.fit_loop.epoch_progress.increment_processed()
            trainer.fit_loop.epoch_progress.increment_completed()

    def _makes_new_loaders(self, trainer: L.Trainer) -> bool:
        """Return whether another epoch than that of the save comes next, with new training loaders."""
        return self._is_reload_due(trainer) and (self.start.between_epochs or not self.is_same_epoch)

    def _is_reload_due(self, trainer: Any) -> bool:
        note = self._state_of_rank().get("made_loaders", {}).get("train")
        interval = trainer.reload_dataloaders_every_n_epochs
        return bool(interval) and (note is None or self.start.epoch - note["epoch"] >= interval)

    def _restore_saved_state(self, trainer: Any, module: L.LightningModule) -> None:
        """Set again what was loaded and has changed as the first batch was moved: the save had counted that batch."""
        for name, buffer in module.named_buffers():
            if name in self._saved_buffers:
                buffer.copy_(self._saved_buffers[name])
        if self.start.is_fetched and self._data_state is not None and has_transfer_hooks(trainer.datamodule):
            trainer.datamodule.load_state_dict(self._data_state)

    def _is_same_plan(self, trainer: L.Trainer) -> bool:
        """Return whether training is as long as it was when it was saved, on as many ranks."""
        now, saved = position.current_position(trainer), self.saved_position
        return all(now[key] == saved[key] for key in ("ends", "world_size", "accumulate", "batches_per_epoch"))

    def _state_of_rank(self) -> dict[str, Any]:
        """Return this rank's own state, or with another world size rank 0's."""
        return self.rank_state if self.is_same_world_size else read_rank_state(self.folder, 0)

    def _restore(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Restore metrics and random numbers, at the point where they were saved: making loaders draws numbers, too."""
        if self.is_same_epoch:
            ranks = range(self.saved_position["world_size"] if trainer.is_global_zero else 1)
            states = [self.rank_state]
            if not self.is_same_world_size:
                states = [read_rank_state(self.folder, rank) for rank in ranks]
            epoch_states = [state["epoch"] for state in states]
            epoch_metrics.restore(trainer, module, states=epoch_states, is_own=self.is_same_world_size)
        # Of a rank that is new, too: outside of steps all ranks draw the same numbers.
        randomness.restore(self._state_of_rank()["random"])

    def _loader_places(self) -> list[dict[str, Any]]:
        return self._state_of_rank()["loaders"] if self.is_same_epoch else []

    def _num_batches_skipped(self) -> int:
        """Return how many batches of this epoch are left out, in the layout of now."""
        then = self.saved_position
        return self.start.batches - then["batches"] * self.start.micro_batches_per_step // then["accumulate"]


def _keep_random_state(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does the same without changing the random state."""

    def call_and_restore() -> None:
        random_state = randomness.plain_state()
        function()
        randomness.restore(random_state)

    return call_and_restore
