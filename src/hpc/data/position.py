"""The position of a run in its epoch, counted so that it is the same place for any number of ranks and micro-steps."""

import math
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from hpc.config.errors import ConfigError
from hpc.data.rank_steps import data_rank_and_size
from hpc.data.sample_order import ARRAYS, order_of
from hpc.privates.lightning import set_sampler_epoch
from hpc.state import randomness

EVALUATION_LIMITS = ("limit_val_batches", "limit_test_batches")


@dataclass(frozen=True)
class DataPosition:
    """The position at which a run resumes. Batches are micro-batches of one rank, as Lightning counts them now."""

    epoch: int
    batches: int  # of this epoch, done
    between_epochs: bool
    is_fetched: bool  # whether the next batch had been fetched when the run was saved
    num_fetched: int  # batches of all epochs, the next one included
    stepped: int  # Lightning's `_batches_that_stepped`
    micro_batches_per_step: int


def current_position(trainer: L.Trainer) -> dict[str, Any]:
    """Return the position between two optimizer steps, and what must not change until it is resumed, as plain data."""
    loop = trainer.fit_loop.epoch_loop
    epoch: Any = trainer.fit_loop.epoch_progress.current
    # A saved `ready` count means: this epoch has begun and the previous one is complete.
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
        "batches_per_epoch": to_int_if_finite(trainer.num_training_batches),
        "validate_every": to_int_if_finite(trainer.val_check_batch),
        "samples": samples_per_micro_batch(trainer),
        "world_size": trainer.world_size,
        "num_ranks": num_data_ranks(trainer),
        "limits": {key: getattr(trainer, key) for key in EVALUATION_LIMITS},
        "validated": validation_samples(trainer),
    }


def set_counters(loops: dict[str, Any], saved: dict[str, Any], *, accumulate: int, skipped: int = 0) -> DataPosition:
    """Set Lightning's counters for a run whose accumulate_grad_batches may differ from that of the save.

    Args:
        loops: the saved state of the fit loop, changed in place.
        saved: the result of `current_position` when the run was saved.
        accumulate: micro-batches per step now.
        skipped: optimizer steps whose samples are left out; they may reach into another epoch.

    Raises:
        ConfigError: the steps of an epoch cannot be cut in this way.
    """
    was, per_epoch, num_epochs = saved["accumulate"], saved["batches_per_epoch"], 0
    batches, total = saved["batches"], loops["epoch_loop.batch_progress"]["total"]["completed"]
    if skipped and per_epoch:
        num_epochs, steps = divmod(math.ceil(batches / was) + skipped, math.ceil(per_epoch / was))
        batches, total = steps * was, total + skipped * was
    if accumulate != was and (total % was or (per_epoch or 0) % was):
        rule = f"must stay {was}, as the last step of an epoch is incomplete and could not be cut otherwise"
        raise ConfigError("trainer.accumulate_grad_batches", accumulate, rule, f"trainer.accumulate_grad_batches={was}")
    between_epochs = saved["between_epochs"] and not skipped
    batches, total = batches * accumulate // was, total * accumulate // was
    progress = loops["epoch_loop.batch_progress"]
    progress["is_last_batch"] = False
    _set_counter(progress["current"], done=batches, ready=batches)
    # One more is ready within an epoch: otherwise Lightning takes it for the end of an epoch.
    _set_counter(progress["total"], done=total, ready=total + (not between_epochs))
    for counter in loops["epoch_progress"].values():
        num_begun = counter["completed"] + num_epochs + (not between_epochs)
        _set_counter(counter, done=counter["completed"] + num_epochs, ready=num_begun)
        counter["started"] = num_begun
    return DataPosition(
        epoch=saved["epoch"] + num_epochs,
        batches=batches,
        between_epochs=between_epochs,
        is_fetched=saved["is_fetched"],
        num_fetched=(saved["num_fetched"] - 1 + skipped * was) * accumulate // was + 1,
        stepped=saved["stepped"],
        micro_batches_per_step=accumulate,
    )


def start_at(trainer: L.Trainer, start: DataPosition) -> None:
    """Let the loaders begin at this position, also if their iterators exist because a schedule asked for the length."""
    loop = trainer.fit_loop
    if start.between_epochs:  # the epoch begins with all its hooks
        for resumed_loop in (loop, loop.epoch_loop, loop.epoch_loop.val_loop, loop.epoch_loop.automatic_optimization):
            resumed_loop._restarting = resumed_loop._resuming_from_checkpoint = False
        return
    combined: Any = loop._combined_loader
    repeats_shorter = combined._mode == "max_size_cycle"  # a loader that has ended begins again
    for loader in combined.flattened:
        set_sampler_epoch(loader, start.epoch)
        if (order := order_of(loader)) is not None:
            done = start.batches % len(order) if repeats_shorter else min(start.batches, len(order))
            order.go_to(start.epoch, done)
    generators = [generator for loader in combined.flattened if (generator := getattr(loader, "generator", None))]
    with randomness.kept(generators):  # from which each iterator draws a seed: the run has done so once in this epoch
        iter(loop._data_fetcher)  # type: ignore[call-overload]
    combined._iterator._idx = start.batches
    if repeats_shorter:
        lengths = [sized_len(loader) for loader in combined.flattened]
        combined._iterator._consumed = [length is not None and start.batches >= length for length in lengths]


def micro_batches_per_step(trainer: L.Trainer, epoch: int) -> int:
    """Return the micro-batches per step in an epoch. A schedule sets the Trainer's value only when it begins."""
    schedule = accumulation_schedule(trainer)
    return schedule.get_accumulate_grad_batches(epoch) if schedule else trainer.accumulate_grad_batches


def accumulation_schedule(trainer: L.Trainer) -> GradientAccumulationScheduler | None:
    callbacks: list[Any] = getattr(trainer, "callbacks", [])  # a trainer outside of training has none
    return next((callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)), None)


def samples_per_micro_batch(trainer: L.Trainer) -> list[int]:
    """Return for each training loader how many samples all ranks together take from it at a time."""
    return [(_batch_size(loader) or 1) * num_data_ranks(trainer) for loader in training_loaders(trainer)]


def describe_batch_size(trainer: L.Trainer, *, configured: int | None) -> str:
    """Return in words how many samples the training loaders give each device, and a step in all.

    Args:
        configured: of each device, according to the config; None: it says nothing.
    """
    sizes = [_batch_size(loader) for loader in training_loaders(trainer)]
    if None in sizes:
        return "batch size: as the loaders of the data have it, on each device"
    ranks, accumulate = num_data_ranks(trainer), micro_batches_per_step(trainer, trainer.current_epoch)
    each, whole = (" and ".join(str(size * times) for size in sizes) for times in (1, ranks * accumulate))  # type: ignore
    accumulated = f" * {accumulate} accumulated" if accumulate > 1 else ""
    text = f"batch size: {each} on each device * {ranks} device{'s' * (ranks > 1)}{accumulated} = {whole}"
    other = configured is not None and sizes != [configured]
    return f"{text}, as the data's loader has it; the config says {configured} on each device" if other else text


def _batch_size(loader: Any) -> int | None:
    """Return the samples of a batch of this rank; None if the loader does not say."""
    order = order_of(loader)
    if order is not None and order.gives == ARRAYS:
        return order.batch_size
    return getattr(loader, "batch_size", None)


def validation_samples(trainer: L.Trainer) -> list[int] | None:
    """Return for each validation loader how many samples all ranks take from it; 0: all; None: no loaders exist yet."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if loop._combined_loader is None:
        return None
    counts = []
    for loader, num in zip(loop._combined_loader.flattened, loop.max_batches, strict=True):
        parts, length = getattr(getattr(loader, "sampler", None), "parts", None), sized_len(loader)
        size = len(parts[0]) if parts else getattr(loader, "batch_size", None) or 1  # the last part may be larger
        takes_all = num >= (math.inf if length is None else length)
        counts.append(0 if takes_all else int(num) * size * num_data_ranks(trainer))
    return counts


def training_loaders(trainer: L.Trainer) -> list[Any]:
    """Return the training loaders that exist by now."""
    combined = trainer.fit_loop._combined_loader
    return combined.flattened if combined is not None else []


def has_global_order(loader: Any) -> bool:
    """Return whether the order of a loader's samples is the same on any number of ranks."""
    order = order_of(loader)
    return order is not None and order.is_shared


def num_data_ranks(trainer: L.Trainer) -> int:
    """Return the number of ranks that get different samples."""
    return data_rank_and_size(trainer.strategy)["num_ranks"]


def to_int_if_finite(number: float | None) -> int | None:
    return int(number) if number is not None and math.isfinite(number) else None


def _set_counter(counter: dict[str, int], *, done: int, ready: int) -> None:
    counter.update(ready=ready, started=done, processed=done, completed=done)
