"""Checks that a saved position is the same place in the data with the loaders, layout and limits of the resumed run."""

from typing import Any

import lightning as L

from hpc.config.errors import ConfigError
from hpc.data import position
from hpc.data.position import DataPosition


def reject_earlier_end(trainer: L.Trainer, saved: dict[str, Any], *, steps: int) -> None:
    """Raise `ConfigError` if training now ends before the saved position: Lightning would take it for finished.

    An unchanged end is accepted: with several optimizers, the last batch makes several steps and goes beyond it.

    Args:
        steps: optimizer steps that are done.
    """
    epochs = saved["epoch"] + (saved["batches"] > 0 and not saved["between_epochs"])
    ends = {"step": (trainer.max_steps, steps), "epoch": (trainer.max_epochs, epochs)}
    for unit, (end, done) in ends.items():
        if end is not None and -1 < end < done and end != saved["ends"][unit]:
            rule = f"must be at least {done}: the run has reached {unit} {done}, and must not end before it"
            raise ConfigError(f"trainer.max_{unit}s", end, rule, f"trainer.max_{unit}s={done}, or more")


def check_position(trainer: L.Trainer, saved: dict[str, Any], *, start: DataPosition, other_data: bool = False) -> None:
    """Check, once the loaders exist, that `start` is the place in the data that was saved. Raise `ConfigError`.

    Args:
        saved: the result of `position.current_position` when the run was saved.
        other_data: whether the data have changed since, on purpose.
    """
    loaders = position.training_loaders(trainer)
    if start.batches and _changes_order(trainer, saved) and not all(map(position.has_global_order, loaders)):
        rule = "cannot change from one rank to several (or back) within an epoch of this loader, "
        rule += "because its order depends on the number of ranks"
        raise ConfigError("trainer.devices", trainer.num_devices, rule, "as many devices as before")
    _check_samples_per_step(trainer, saved, start)  # first, as the numbers of batches follow from it
    _check_batch_counts(trainer, saved, start, other_data=other_data)
    _check_epoch_length(trainer, start, other_data=other_data)
    if _has_other_micro_batches(trainer, saved, start):
        _check_evaluations(trainer, saved, start)


def _changes_order(trainer: L.Trainer, saved: dict[str, Any]) -> bool:
    """Return whether the run has moved between one rank and several."""
    return (saved["num_ranks"] == 1) != (position.num_data_ranks(trainer) == 1)


def _has_other_micro_batches(trainer: L.Trainer, saved: dict[str, Any], start: DataPosition) -> bool:
    """Return whether a global batch is cut into other micro-batches than before."""
    now = start.micro_batches_per_step, position.num_data_ranks(trainer)
    return (saved["accumulate"], saved["num_ranks"]) != now


def _check_samples_per_step(trainer: L.Trainer, saved: dict[str, Any], start: DataPosition) -> None:
    now = start.micro_batches_per_step
    before = [size * saved["accumulate"] for size in saved["samples"]]
    after = [size * now for size in position.samples_per_micro_batch(trainer)]
    if before == after:
        return
    key, value, fix = _changed_key(trainer, saved, start)
    is_one_loader = len(before) == len(after) == 1
    if is_one_loader and before[0] * now % after[0] == 0 and not position.accumulation_schedule(trainer):
        fix = f"trainer.accumulate_grad_batches={before[0] * now // after[0]}"
    rule = f"A step must have as many samples as before: {_join(before)}, not {_join(after)}"
    raise ConfigError(key, value, rule, fix)


def _check_batch_counts(trainer: L.Trainer, saved: dict[str, Any], start: DataPosition, *, other_data: bool) -> None:
    """Check that an epoch, and the interval of validation, have as many optimizer steps as before."""
    was, now = saved["accumulate"], start.micro_batches_per_step
    per_epoch = position.to_int_if_finite(trainer.num_training_batches)
    validate_every = position.to_int_if_finite(trainer.val_check_batch)
    for key, value, before, after in (
        ("limit_train_batches", trainer.limit_train_batches, saved["batches_per_epoch"], per_epoch),
        ("val_check_interval", trainer.val_check_interval, saved["validate_every"], validate_every),
    ):
        if other_data and value != after:
            continue  # the value is a share of the batches, whose number has changed with the data
        if (
            not _has_other_micro_batches(trainer, saved, start)
            or None in (before, after)
            or after * was == before * now
        ):
            continue
        if isinstance(value, float) and value == 1.0 and after * was < before * now:  # there are no more batches
            key, value, fix = _changed_key(trainer, saved, start)
            rule = f"An epoch must have as many batches per rank as before, {before} in steps of {was}; "
            raise ConfigError(key, value, f"{rule}now it has {after}, in steps of {now}", fix)
        rule = f"must be {before}/{was} steps of micro-batches, as before"
        is_whole = before * now % was == 0
        fix = f"trainer.{key}={before * now // was}" if is_whole else f"trainer.accumulate_grad_batches={was}"
        raise ConfigError(f"trainer.{key}", value, rule, fix)


def _check_epoch_length(trainer: L.Trainer, start: DataPosition, *, other_data: bool) -> None:
    """Check that the epoch has more batches than are done."""
    per_epoch = position.to_int_if_finite(trainer.num_training_batches)
    if per_epoch is None or start.batches < per_epoch:
        return
    rule = f"The epoch must have more batches than the {start.batches} that are done; now it has {per_epoch}"
    if other_data:
        fix = "the data as they were until this epoch has ended, or a new run from its weights: ckpt=<last.ckpt>"
        raise ConfigError("data", None, rule, fix)
    raise ConfigError("trainer.limit_train_batches", trainer.limit_train_batches, rule, "the value that the run had")


def _check_evaluations(trainer: L.Trainer, saved: dict[str, Any], start: DataPosition) -> None:
    """Check that as many samples are evaluated, cut into other batches. A limit that is lifted is accepted."""
    was, now = saved["accumulate"], start.micro_batches_per_step
    samples_before, samples_after = saved["validated"], position.validation_samples(trainer)
    for key, before in saved["limits"].items():
        limit = getattr(trainer, key)
        if limit == 0 or (isinstance(limit, float) and limit == 1.0):  # an int is a number of batches
            continue
        is_count = isinstance(limit, int) and isinstance(before, int)
        is_same = is_count and limit * was == before * now
        if key == "limit_val_batches" and None not in (samples_before, samples_after):
            is_same = samples_before == samples_after
        if is_same:
            continue
        rule = "must select as many samples as before; the batch size per rank has changed"
        is_whole = is_count and before * now % was == 0 and before * now // was != limit
        fix = f"trainer.{key}={before * now // was}" if is_whole else "the layout as before"
        raise ConfigError(f"trainer.{key}", limit, rule, f"{fix}, or trainer.{key}=1.0 for all of them")


def _changed_key(trainer: L.Trainer, saved: dict[str, Any], start: DataPosition) -> tuple[str, object, str]:
    """Return the config key that changed the micro-batches, its value, and the fix."""
    was, now = saved["accumulate"], start.micro_batches_per_step
    if saved["num_ranks"] != position.num_data_ranks(trainer):
        return "trainer.devices", trainer.num_devices, "as many devices as before"
    if was == now:
        return "data", None, "batches as large as before"
    if schedule := position.accumulation_schedule(trainer):
        return "callbacks", type(schedule).__name__, f"a schedule that has {was} in this epoch, as before"
    return "trainer.accumulate_grad_batches", now, f"trainer.accumulate_grad_batches={was}"


def _join(numbers: list[int]) -> str:
    return " and ".join(map(str, numbers))
