"""Check whether a run can resume at a saved position with the loaders, layout and limits that it has now."""

from typing import Any

import lightning as L
from torch.utils.data import DistributedSampler, SequentialSampler

from hpc.config.errors import ConfigError
from hpc.data import position
from hpc.data.position import StartPosition


def reject_earlier_end(trainer: L.Trainer, saved: dict[str, Any], *, steps: int) -> None:
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


def check_position(
    trainer: L.Trainer, saved: dict[str, Any], *, start: StartPosition, other_data: bool = False
) -> None:
    """When the loaders are there: is this place the same as the one that was saved? Raises `ConfigError`.

    Args:
        other_data: the data have changed since, and that is meant.
    """
    was, now = saved["accumulate"], start.micro_batches_per_step
    if (
        start.batches
        and _between_one_and_many(trainer, saved)
        and not all(map(position.has_global_order, position.training_loaders(trainer)))
    ):
        rule = "within an epoch, one rank goes through a plain DataLoader in another order than several ranks do"
        raise ConfigError("trainer.devices", trainer.num_devices, rule, "as many devices as before")
    _check_samples(trainer, saved, now)  # before numbers of batches, which follow from it
    per_epoch, validate_every = (
        position.finite_or_none(trainer.num_training_batches),
        position.finite_or_none(trainer.val_check_batch),
    )
    is_moved = (was, saved["num_ranks"]) != (now, position.num_data_ranks(trainer))
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


def describe_order_change(trainer: L.Trainer, saved: dict[str, Any]) -> str:
    """Return what to tell where the samples come in another order now; "" where they do not."""
    batches = [
        getattr(loader, "batch_sampler", None) for loader in position.training_loaders(trainer)
    ]  # None: those of this project
    orders = [getattr(one, "sampler", None) for one in batches]  # the researcher's own
    kept = SequentialSampler | DistributedSampler | None  # the same order on any number of ranks
    if not _between_one_and_many(trainer, saved) or all(isinstance(order, kept) for order in orders):
        return ""
    before = "several ranks" if saved["num_ranks"] > 1 else "one rank"
    said = f"from here on samples come in another order than on {before}, each still once in an epoch"
    return f"note: train: {said}: one rank draws the order of a DataLoader as Lightning does, several by seed and epoch"


def _between_one_and_many(trainer: L.Trainer, saved: dict[str, Any]) -> bool:
    return (saved["num_ranks"] == 1) != (position.num_data_ranks(trainer) == 1)


def _check_samples(trainer: L.Trainer, saved: dict[str, Any], now: int) -> None:
    was = saved["accumulate"]
    before, after = [
        [one * k for one in sizes]
        for sizes, k in ((saved["samples"], was), (position.samples_per_micro_batch(trainer), now))
    ]
    if before == after:
        return
    key, value, fix = _layout(trainer, saved, now)
    if (
        len(before) == len(after) == 1
        and before[0] * now % after[0] == 0
        and not position.accumulation_schedule(trainer)
    ):
        fix = f"trainer.accumulate_grad_batches={before[0] * now // after[0]}"
    rule = f"a step must have as many samples as before: {_listed(before)}, not {_listed(after)}"
    raise ConfigError(key, value, rule, fix)


def _layout(trainer: L.Trainer, saved: dict[str, Any], now: int) -> tuple[str, object, str]:
    """Return the key by which a step is cut otherwise than before, its value, and how to have it as before."""
    was = saved["accumulate"]
    if saved["num_ranks"] != position.num_data_ranks(trainer):
        return "trainer.devices", trainer.num_devices, "as many devices as before"
    if was == now:
        return "data", None, "batches as large as before"
    if schedule := position.accumulation_schedule(trainer):
        return "callbacks", type(schedule).__name__, f"a schedule that has {was} in this epoch, as before"
    return "trainer.accumulate_grad_batches", now, f"trainer.accumulate_grad_batches={was}"


def _check_evaluations(trainer: L.Trainer, saved: dict[str, Any], now: int) -> None:
    """Are as many samples evaluated, cut into other batches? A limit that is lifted counts none."""
    was, taken = saved["accumulate"], (saved["validated"], position.validation_samples(trainer))
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


def _listed(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
