"""Where in its epoch a run is: counted so that it is the same place for any number of ranks and micro-steps."""

import math
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len  # the first as before each epoch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from hpc.config.errors import ConfigError
from hpc.data.sampler import GlobalBatchSampler, ResumableLoader

EVALUATIONS = ("limit_val_batches", "limit_test_batches")


@dataclass(frozen=True)
class StartPosition:
    """Where a run goes on. Batches are micro-batches of one rank, as Lightning counts them in this layout."""

    epoch: int
    batches: int  # of this epoch, that are done
    between_epochs: bool
    is_fetched: bool  # was the next batch fetched when the run was saved?
    num_fetched: int  # batches of all epochs, the next one included
    stepped: int
    micro_batches_per_step: int


def current_position(trainer: L.Trainer) -> dict[str, Any]:
    """As it is saved, between two optimizer steps."""
    loop = trainer.fit_loop.epoch_loop
    epoch: Any = trainer.fit_loop.epoch_progress.current
    # An epoch that is ready begins, and the one before it has ended, as far as what is saved is concerned.
    batches, between_epochs = loop.batch_progress, epoch.completed == epoch.ready or epoch.started < epoch.ready
    is_fetched = not between_epochs and batches.current.ready > batches.current.completed
    return {
        "epoch": trainer.current_epoch,
        "batches": 0 if between_epochs else batches.current.completed,
        "between_epochs": between_epochs,
        "is_fetched": is_fetched,
        "num_fetched": batches.total.ready + (not is_fetched),
        "accumulate": micro_batches_per_step(trainer, trainer.current_epoch),  # between epochs that is the next one
        "stepped": loop._batches_that_stepped,
        "stopped_early": trainer.should_stop,
        "ends": {"step": trainer.max_steps, "epoch": trainer.max_epochs},
        "batches_per_epoch": finite_or_none(trainer.num_training_batches),
        "validate_every": finite_or_none(trainer.val_check_batch),
        "samples": samples_per_micro_batch(trainer),
        "world_size": trainer.world_size,
        "num_ranks": num_data_ranks(trainer),
        "limits": {key: getattr(trainer, key) for key in EVALUATIONS},
        "validated": validation_samples(trainer),
    }


def set_counters(loops: dict[str, Any], saved: dict[str, Any], *, accumulate: int, skipped: int = 0) -> StartPosition:
    """Set Lightning's counters for a run that may cut its global batches into other micro-steps now.

    Args:
        loops: of the fit loop, as they were saved; changed in place.
        saved: what `current_position` returned then.
        accumulate: micro-batches of a step now.
        skipped: optimizer steps whose samples are left out; they may reach into another epoch.

    Raises:
        ConfigError: the steps of an epoch cannot be cut in this way.
    """
    was, per_epoch, epochs = saved["accumulate"], saved["batches_per_epoch"], 0
    batches, in_all = saved["batches"], loops["epoch_loop.batch_progress"]["total"]["completed"]
    if skipped and per_epoch:
        epochs, steps = divmod(math.ceil(batches / was) + skipped, math.ceil(per_epoch / was))
        batches, in_all = steps * was, in_all + skipped * was
    if accumulate != was and (in_all % was or (per_epoch or 0) % was):
        rule = f"epochs end with an incomplete step, so steps must go on to be made of {was} micro-batches"
        raise ConfigError("trainer.accumulate_grad_batches", accumulate, rule, f"trainer.accumulate_grad_batches={was}")
    between_epochs = saved["between_epochs"] and not skipped
    batches, in_all = batches * accumulate // was, in_all * accumulate // was
    progress = loops["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False
    _set(progress["current"], batches, batches)
    _set(progress["total"], in_all, in_all + (not between_epochs))  # else Lightning takes it for the end of an epoch
    for counter in loops["epoch_progress"].values():
        begun = counter["completed"] + epochs + (not between_epochs)
        _set(counter, counter["completed"] + epochs, begun)
        counter["started"] = begun
    return StartPosition(
        epoch=saved["epoch"] + epochs,
        batches=batches,
        between_epochs=between_epochs,
        is_fetched=saved["is_fetched"],
        num_fetched=(saved["num_fetched"] - 1 + skipped * was) * accumulate // was + 1,
        stepped=saved["stepped"],
        micro_batches_per_step=accumulate,
    )


def accumulation_schedule(trainer: L.Trainer) -> GradientAccumulationScheduler | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)), None)


def micro_batches_per_step(trainer: L.Trainer, epoch: int) -> int:
    """Micro-batches of a step in this epoch. A schedule says so to the Trainer only when an epoch begins."""
    schedule = accumulation_schedule(trainer)
    return schedule.get_accumulate_grad_batches(epoch) if schedule else trainer.accumulate_grad_batches


def start_at(trainer: L.Trainer, start: StartPosition) -> None:
    """Let the loaders begin there. They have begun already where the schedule asked how many batches there are."""
    loop = trainer.fit_loop
    if start.between_epochs:  # an epoch begins, with all that belongs to it
        for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop, loop.epoch_loop.automatic_optimization):
            one._restarting = one._resuming_from_checkpoint = False
        return
    combined: Any = loop._combined_loader
    cycles = combined._mode == "max_size_cycle"  # the shorter ones begin again
    for loader in combined.flattened:
        _set_sampler_epoch(loader, start.epoch)
        if isinstance(loader, ResumableLoader):
            done = start.batches % len(loader) if cycles else min(start.batches, len(loader))
            loader.load_state_dict({"epoch": start.epoch, "batches": done})
    iter(loop._data_fetcher)  # type: ignore[call-overload]
    combined._iterator._idx = start.batches
    if cycles:
        combined._iterator._consumed = [start.batches >= len(loader) for loader in combined.flattened]


def samples_per_micro_batch(trainer: L.Trainer) -> list[int]:
    """Of each loader: how many samples all ranks take from it at a time."""
    return [
        loader.sampler.micro_batch_size * loader.sampler.num_ranks
        if has_global_order(loader)
        else (getattr(loader, "batch_size", None) or 1) * num_data_ranks(trainer)
        for loader in training_loaders(trainer)
    ]


def validation_samples(trainer: L.Trainer) -> list[int] | None:
    """Of each loader of validation: how many samples all ranks take from it, 0: all; None: there are no loaders yet."""
    loop, found = trainer.fit_loop.epoch_loop.val_loop, []
    if loop._combined_loader is None:
        return None
    for loader, num in zip(loop._combined_loader.flattened, loop.max_batches, strict=True):
        parts, length = getattr(getattr(loader, "sampler", None), "parts", None), sized_len(loader)
        size = len(parts[0]) if parts else getattr(loader, "batch_size", None) or 1  # the last part may be larger
        found.append(
            0 if num >= (math.inf if length is None else length) else int(num) * size * num_data_ranks(trainer)
        )
    return found


def training_loaders(trainer: L.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return combined.flattened if combined is not None else []


def has_global_order(loader: Any) -> bool:
    return isinstance(getattr(loader, "sampler", None), GlobalBatchSampler)


def num_data_ranks(trainer: L.Trainer) -> int:
    """Ranks that get different samples."""
    return (getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)


def _set(counter: dict[str, int], done: int, ready: int) -> None:
    counter.update(ready=ready, started=done, processed=done, completed=done)


def finite_or_none(number: float | None) -> int | None:
    return int(number) if number is not None and math.isfinite(number) else None
