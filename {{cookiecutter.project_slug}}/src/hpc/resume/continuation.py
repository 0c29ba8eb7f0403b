"""What a run goes on from: saved between two steps, restored when training starts and when its first batch is there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from hpc.checkpoint import weights
from hpc.checkpoint.load_hooks import researcher_callbacks
from hpc.checkpoint.strategy_state import RANK_STATE, read_rank_state
from hpc.data import position, position_checks, replay, same_data
from hpc.resume import accumulated_gradients, epoch_metrics, schedules
from hpc.state import attributes, randomness, trainer_settings
from hpc.state.batch_effects import has_transfer_hooks
from hpc.training import weight_averaging
from hpc.training.synced_buffers import SyncsBuffers


def state_to_save(
    trainer: L.Trainer,
    module: L.LightningModule,
    built: attributes.InitialAttributes,
    was_set: trainer_settings.InitialSettings,
    began: Any,
) -> dict[str, Any]:
    """What Lightning does not save, for a checkpoint; below MINE what is this rank's own.

    Args:
        began: random state with which the module's own `on_train_start` was called.
    """
    place = position.current_position(trainer)
    buffers = trainer.strategy.own_buffers() if isinstance(trainer.strategy, SyncsBuffers) else {}
    return {
        "position": place,
        "scheduled": schedules.scheduled_values(trainer.optimizers),
        RANK_STATE: {
            "random": randomness.plain_state(),
            "began": began,
            "epoch": epoch_metrics.state(trainer, module),
            "gradients": accumulated_gradients.state(module),
            "attributes": [
                *attributes.find_changed(trainer, module, initial=built),
                *attributes.buffers_as_changed(buffers),
            ],
            "settings": trainer_settings.find_changed(trainer, was_set),
            "evaluation": replay.evaluation_generators(trainer),
            "loaders": replay.loader_places(
                trainer, is_fetched=place["is_fetched"], between_epochs=place["between_epochs"]
            ),
        },
    }


class Continuation:
    """Restores what `saved` returned.

    Args:
        checkpoint: Lightning's counters in it are changed in place.
        skipped: optimizer steps whose samples are left out.

    Raises:
        ConfigError: the run cannot go on there in this layout.
    """

    def __init__(self, trainer: L.Trainer, checkpoint: dict[str, Any], skipped: int) -> None:
        self.place, self.scheduled = checkpoint["position"], checkpoint["scheduled"]
        position_checks.reject_earlier_end(trainer, self.place, steps=checkpoint["global_step"])
        accumulate = position.micro_batches_per_step(trainer, self.place["epoch"])
        self.start = position.set_counters(
            checkpoint["loops"]["fit_loop"], self.place, accumulate=accumulate, skipped=skipped
        )
        self.is_own = self.place["world_size"] == trainer.world_size
        self.folder, self.own = Path(str(trainer.ckpt_path)), checkpoint[RANK_STATE]
        self.of_data = checkpoint.get(type(getattr(trainer, "datamodule", None)).__qualname__)
        self.buffers: dict[str, Tensor] = {}  # as they were saved
        self.began = self._of_rank().get("began")
        self.built = self._restore_data(trainer)  # before loaders are made of it
        if self.start.epoch != self.place["epoch"] and trainer.is_global_zero:
            left = "a validation, and what schedules and callbacks do there"
            print(f"note: the end of epoch {self.place['epoch']} is among what is left out: {left}", flush=True)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule, tick: Callable[[], object]) -> None:
        """Go to the place. `tick` is called for each batch that is passed over. Raises `ConfigError`."""
        other_data = same_data.has_changed_data(trainer)
        position_checks.check_position(trainer, self.place, start=self.start, other_data=other_data)
        if (note := position_checks.describe_order_change(trainer, self.place)) and trainer.is_global_zero:
            print(note, flush=True)
        is_same_epoch = self.start.epoch == self.place["epoch"]
        loaders = (self.own or read_rank_state(self.folder, 0))["loaders"] if is_same_epoch else []
        replay.prepare_loaders(trainer, loaders)
        position.start_at(trainer, self.start)
        if not self.start.between_epochs:
            is_same = self.is_own and self.start.batches == self.place["batches"]
            replay.pass_over_batches(
                trainer, loaders, num_done=self._batches, tick=tick, is_same=is_same and not other_data
            )
            self.built = self._restore_data(trainer) | self.built  # also what collates
        schedules.restore(trainer.optimizers, self.scheduled)
        if not self.start.is_fetched:
            self._restore(trainer, module)
        if self.start.is_fetched and has_transfer_hooks(module):
            saved = module.state_dict(keep_vars=True).keys()
            self.buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if name in saved}
        if self.start.between_epochs and trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            self.built = self._restore_data(trainer) | self.built
            trainer.fit_loop._last_train_dl_reload_epoch = float("-inf")  # once more, now with the right random numbers
        # Where a validation was just done, Lightning counts it by this, which makes an iterator of its data.
        validation = trainer.fit_loop.epoch_loop.val_loop
        validation.increment_progress_to_evaluation_end = _without_draws(  # type: ignore[method-assign]
            validation.increment_progress_to_evaluation_end
        )

    def on_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Before what the module does there."""
        own = self._of_rank()
        state = own.get("attributes", [])
        if self.start.between_epochs and trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            of_data = attributes.DATA, attributes.COLLATE  # which are there, and have made loaders since
            state = [entry for entry in state if not entry[0].startswith(of_data)]
        attributes.restore(trainer, module, changed=state)
        trainer_settings.restore(trainer, own.get("settings", []))

    def on_first_batch(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Lightning counts on its own when it restarts, once too often."""
        start, loop = self.start, trainer.fit_loop.epoch_loop
        loop._batches_that_stepped, loop.batch_progress.total.ready = start.stepped, start.num_fetched
        trainer.fit_loop._restarting = False  # else this epoch would end without a look at plateaus
        self._untransfer(trainer, module)
        if not start.between_epochs:  # what belongs to the beginning of an epoch is done then
            trainer.accumulate_grad_batches = start.accumulate
            self.on_epoch_start(trainer, module)
        # Of other ranks rank 0's: they share what they have averaged.
        accumulated_gradients.restore(module, self._of_rank().get("gradients", {}))
        trainer._logger_connector._first_loop_iter = start.batches == 0  # the first one of an epoch clears its sums
        if start.is_fetched:
            self._restore(trainer, module)

    def _untransfer(self, trainer: Any, module: L.LightningModule) -> None:
        """When it was saved, the batch that comes first had already been transferred: what that changed was saved."""
        for name, buffer in module.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])
        if self.start.is_fetched and self.of_data is not None and has_transfer_hooks(trainer.datamodule):
            trainer.datamodule.load_state_dict(self.of_data)

    def made_loaders(self, trainer: L.Trainer) -> dict[str, Any]:
        """What `MadeLoaders` noted of loaders that are still those of the place where this goes on."""
        made, start = self._of_rank().get("made_loaders", {}), self.start
        anew = trainer.reload_dataloaders_every_n_epochs and (  # type: ignore[attr-defined]
            start.between_epochs or start.epoch != self.place["epoch"]
        )
        return {split: note for split, note in made.items() if split != "train" or not anew}

    def transferred(self) -> dict[str, Any] | None:
        """What there was before the batch that comes first was brought to the device."""
        noted = self._of_rank().get("transferred") if self.start.is_fetched else None
        return noted | {"random": None} if noted and not self.is_own else noted

    def evaluation(self) -> list[list[Any]]:
        """What each loader of a validation draws with."""
        return self._of_rank().get("evaluation", [])

    def on_nothing_left(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """All steps were done: let callbacks and the test see what they would have seen right after them."""
        epoch_metrics.show(trainer, self._of_rank()["epoch"])
        attributes.restore(trainer, module, changed=self._of_rank().get("attributes", []))
        last = self.start.epoch - self.start.between_epochs
        trainer.accumulate_grad_batches = position.micro_batches_per_step(trainer, last)
        if not self.start.between_epochs:
            trainer.fit_loop.epoch_progress.increment_processed()
            trainer.fit_loop.epoch_progress.increment_completed()

    def _restore_data(self, trainer: L.Trainer) -> attributes.InitialAttributes:
        return attributes.restore_data(trainer, trainer.lightning_module, changed=self._of_rank().get("attributes", []))

    def _of_rank(self) -> dict[str, Any]:
        return self.own if self.is_own else read_rank_state(self.folder, 0)

    def _restore(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Where it was saved, too: what comes before, as making loaders, draws numbers."""
        if self.start.epoch == self.place["epoch"]:
            ranks = range(self.place["world_size"] if trainer.is_global_zero else 1)
            states = [self.own] if self.is_own else [read_rank_state(self.folder, rank) for rank in ranks]
            epoch_metrics.restore(trainer, module, states=[state["epoch"] for state in states], is_own=self.is_own)
        if "random" in self.own:
            randomness.restore(self.own["random"])

    def _batches(self, done: int | None) -> int:
        """How many batches of a loader are done: of one that ends early and begins again, in its present pass."""
        start, place = self.start, self.place
        if done is None or start.epoch != place["epoch"]:
            return start.batches
        more = start.batches - place["batches"] * start.accumulate // place["accumulate"]  # those that are left out
        return done * start.accumulate // place["accumulate"] + more


def tells_changes(trainer: L.Trainer, module: L.LightningModule) -> Callable[[], None]:
    """Return what tells that weights are others than now, when the last checkpoint has been made of them."""
    before, callbacks = weights.local_sums(module), trainer.callbacks  # type: ignore[attr-defined]
    averages = any(
        isinstance(callback, weight_averaging.AVERAGING_CALLBACKS) for callback in callbacks
    )  # which is in it

    def tell() -> None:
        if trainer.is_global_zero and not (averages or torch.equal(before, weights.local_sums(module))):
            said = "on_train_end has changed weights: what is tested now is not in last.ckpt, which has those before it"
            print(f"note: {said}", flush=True)

    return tell


def end_training(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Call what Lightning does not, where no step was left. It may change weights, after the last checkpoint."""
    for callback in researcher_callbacks(trainer):
        if not isinstance(callback, weight_averaging.AVERAGING_CALLBACKS):  # whose average is in place
            callback.on_train_end(trainer, module)
    module.on_train_end()


def repeat_draws_of_start(state: dict[str, Any], module: L.LightningModule) -> None:
    """Let callbacks and the module draw in `on_train_start` what they drew when the run began; then go on as before."""
    before, act = randomness.plain_state(), module.on_train_start

    def acted() -> None:
        vars(module).pop("on_train_start")
        act()
        randomness.restore(before)

    randomness.restore(state)
    module.on_train_start = acted  # type: ignore[method-assign]


def _without_draws(act: Callable[[], None]) -> Callable[[], None]:
    def acted() -> None:
        before = randomness.plain_state()
        act()
        randomness.restore(before)

    return acted
