"""Where in its epoch a run is: counted so that it is the same place for any number of ranks and micro-steps."""

import math
from dataclasses import dataclass
from typing import Any

import lightning as L
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len  # the first as before each epoch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DistributedSampler, SequentialSampler

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
        "batches_per_epoch": _finite(trainer.num_training_batches),
        "validate_every": _finite(trainer.val_check_batch),
        "samples": _samples(trainer),
        "world_size": trainer.world_size,
        "num_ranks": _num_ranks(trainer),
        "limits": {key: getattr(trainer, key) for key in EVALUATIONS},
        "validated": validation_samples(trainer),
    }


def set_counters(loops: dict[str, Any], saved: dict[str, Any], accumulate: int, skipped: int = 0) -> StartPosition:
    """Set Lightning's counters for a run that may cut its global batches into other micro-steps now.

    Args:
        loops: of the fit loop, as they were saved; changed in place.
        saved: what `of` returned then.
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
        accumulate=accumulate,
    )


def reject_end_behind(trainer: L.Trainer, saved: dict[str, Any], steps: int) -> None:
    """Raise `ConfigError` where training was to have ended before this place: Lightning would take it for finished.

    Where the end is that of the run itself, its last batch has gone beyond it: several optimizers made a step each.

    Args:
        steps: of the optimizer, that are done.
    """
    epochs = saved["epoch"] + (saved["batches"] > 0 and not saved["between_epochs"])
    ends = {"step": (trainer.max_steps, steps), "epoch": (trainer.max_epochs, epochs)}
    for unit, (end, done) in ends.items():
        if end is not None and -1 < end < done and end != saved["ends"][unit]:
            rule = f"the run has reached {unit} {done}, and must not end before it"
            raise ConfigError(f"trainer.max_{unit}s", end, rule, f"trainer.max_{unit}s={done}, or more")


def micro_batches_per_step(trainer: L.Trainer, epoch: int) -> int:
    """Micro-batches of a step in this epoch. A schedule says so to the Trainer only when an epoch begins."""
    schedule = _schedule(trainer)
    return schedule.get_accumulate_grad_batches(epoch) if schedule else trainer.accumulate_grad_batches


def _schedule(trainer: L.Trainer) -> GradientAccumulationScheduler | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, GradientAccumulationScheduler)), None)


def check(trainer: L.Trainer, saved: dict[str, Any], start: StartPosition, *, other_data: bool = False) -> None:
    """When the loaders are there: is this place the same as the one that was saved? Raises `ConfigError`.

    Args:
        other_data: the data have changed since, and that is meant.
    """
    was, now = saved["accumulate"], start.accumulate
    if start.batches and _between_one_and_many(trainer, saved) and not all(map(_is_ours, _loaders(trainer))):
        rule = "within an epoch, one rank goes through a plain DataLoader in another order than several ranks do"
        raise ConfigError("trainer.devices", trainer.num_devices, rule, "as many devices as before")
    _check_samples(trainer, saved, now)  # before numbers of batches, which follow from it
    per_epoch, validate_every = _finite(trainer.num_training_batches), _finite(trainer.val_check_batch)
    is_moved = (was, saved["num_ranks"]) != (now, _num_ranks(trainer))
    for key, value, before, after in (
        ("limit_train_batches", trainer.limit_train_batches, saved["batches_per_epoch"], per_epoch),
        ("val_check_interval", trainer.val_check_interval, saved["validate_every"], validate_every),
    ):
        if other_data and value != after:
            continue  # it follows from how many batches there are now
        if is_moved and None not in (before, after) and after * was != before * now:
            if isinstance(value, float) and value == 1.0 and after * was < before * now:  # there are no more
                key, value, fix = _layout(trainer, saved, now)
                rule = f"an epoch must have as many batches of a rank as before, {before} in steps of {was}; "
                raise ConfigError(key, value, f"{rule}now there are {after}, in steps of {now}", fix)
            rule = f"counts micro-batches, and must mean as many optimizer steps as before: {before} / {was}"
            fits = before * now % was == 0
            fix = f"trainer.{key}={before * now // was}" if fits else f"trainer.accumulate_grad_batches={was}"
            raise ConfigError(f"trainer.{key}", value, rule, fix)
    if per_epoch is not None and start.batches >= per_epoch:
        rule = f"the run has done {start.batches} batches of its epoch, which must have more; now it has {per_epoch}"
        if other_data:
            fix = "the data as they were until this epoch has ended, or a new run from its weights: ckpt=<last.ckpt>"
            raise ConfigError("data", "changed", rule, fix)
        raise ConfigError(
            "trainer.limit_train_batches", trainer.limit_train_batches, rule, "the value that the run had"
        )
    if is_moved:
        _check_evaluations(trainer, saved, now)


def other_order(trainer: L.Trainer, saved: dict[str, Any]) -> str:
    """Return what to tell where the samples come in another order now; "" where they do not."""
    batches = [getattr(loader, "batch_sampler", None) for loader in _loaders(trainer)]  # None: those of this project
    orders = [getattr(one, "sampler", None) for one in batches]  # the researcher's own
    kept = SequentialSampler | DistributedSampler | None  # the same order on any number of ranks
    if not _between_one_and_many(trainer, saved) or all(isinstance(order, kept) for order in orders):
        return ""
    before = "several ranks" if saved["num_ranks"] > 1 else "one rank"
    said = f"from here on samples come in another order than on {before}, each still once in an epoch"
    return f"note: train: {said}: one rank draws the order of a DataLoader as Lightning does, several by seed and epoch"


def _between_one_and_many(trainer: L.Trainer, saved: dict[str, Any]) -> bool:
    return (saved["num_ranks"] == 1) != (_num_ranks(trainer) == 1)


def _check_samples(trainer: L.Trainer, saved: dict[str, Any], now: int) -> None:
    was = saved["accumulate"]
    before, after = [[one * k for one in sizes] for sizes, k in ((saved["samples"], was), (_samples(trainer), now))]
    if before == after:
        return
    key, value, fix = _layout(trainer, saved, now)
    if len(before) == len(after) == 1 and before[0] * now % after[0] == 0 and not _schedule(trainer):
        fix = f"trainer.accumulate_grad_batches={before[0] * now // after[0]}"
    rule = f"a step must have as many samples as before: {_listed(before)}, not {_listed(after)}"
    raise ConfigError(key, value, rule, fix)


def _layout(trainer: L.Trainer, saved: dict[str, Any], now: int) -> tuple[str, object, str]:
    """Return the key by which a step is cut otherwise than before, its value, and how to have it as before."""
    was = saved["accumulate"]
    if saved["num_ranks"] != _num_ranks(trainer):
        return "trainer.devices", trainer.num_devices, "as many devices as before"
    if was == now:
        return "data", None, "batches as large as before"
    if schedule := _schedule(trainer):
        return "callbacks", type(schedule).__name__, f"a schedule that has {was} in this epoch, as before"
    return "trainer.accumulate_grad_batches", now, f"trainer.accumulate_grad_batches={was}"


def _check_evaluations(trainer: L.Trainer, saved: dict[str, Any], now: int) -> None:
    """Are as many samples evaluated, cut into other batches? A limit that is lifted counts none."""
    was, taken = saved["accumulate"], (saved["validated"], validation_samples(trainer))
    for key, before in saved["limits"].items():
        limit = getattr(trainer, key)
        if limit == 0 or (isinstance(limit, float) and limit == 1.0):  # an int is a number of batches
            continue
        is_count = isinstance(limit, int) and isinstance(before, int)
        is_same = is_count and limit * was == before * now
        if key == "limit_val_batches" and None not in taken:
            is_same = taken[0] == taken[1]
        if is_same:
            continue
        rule = "counts the batches of one rank, which are others now: as many samples as before must be evaluated"
        fits = is_count and before * now % was == 0 and before * now // was != limit
        fix = f"trainer.{key}={before * now // was}" if fits else "the layout as before"
        raise ConfigError(f"trainer.{key}", limit, rule, f"{fix}, or trainer.{key}=1.0 for all of them")


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


def _samples(trainer: L.Trainer) -> list[int]:
    """Of each loader: how many samples all ranks take from it at a time."""
    return [
        loader.sampler.micro_batch_size * loader.sampler.num_ranks
        if _is_ours(loader)
        else (getattr(loader, "batch_size", None) or 1) * _num_ranks(trainer)
        for loader in _loaders(trainer)
    ]


def validation_samples(trainer: L.Trainer) -> list[int] | None:
    """Of each loader of validation: how many samples all ranks take from it, 0: all; None: there are no loaders yet."""
    loop, found = trainer.fit_loop.epoch_loop.val_loop, []
    if loop._combined_loader is None:
        return None
    for loader, num in zip(loop._combined_loader.flattened, loop.max_batches, strict=True):
        parts, length = getattr(getattr(loader, "sampler", None), "parts", None), sized_len(loader)
        size = len(parts[0]) if parts else getattr(loader, "batch_size", None) or 1  # the last part may be larger
        found.append(0 if num >= (math.inf if length is None else length) else int(num) * size * _num_ranks(trainer))
    return found


def _loaders(trainer: L.Trainer) -> list[Any]:
    combined = trainer.fit_loop._combined_loader
    return combined.flattened if combined is not None else []


def _is_ours(loader: Any) -> bool:
    return isinstance(getattr(loader, "sampler", None), GlobalBatchSampler)


def _num_ranks(trainer: L.Trainer) -> int:
    """Ranks that get different samples."""
    return (getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)


def _set(counter: dict[str, int], done: int, ready: int) -> None:
    counter.update(ready=ready, started=done, processed=done, completed=done)


def _finite(number: float | None) -> int | None:
    return int(number) if number is not None and math.isfinite(number) else None


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
