"""Check the position of a resumed run whose micro-batches, limits or data have changed.

Limits and intervals of validation count micro-batches of one rank. They must mean as many optimizer steps as before.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import typed_fixes
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import (
    DataLoader,
)

from hpc.config.errors import ConfigError
from hpc.data import position, position_checks
from hpc.data.batch_parts import batch_ranges
from hpc.data.sample_order import ARRAYS, SampleOrder

NUMBERS = range(50)


def trainer(
    *,
    per_epoch: float,
    every: float,
    ranks: int,
    micro_batch: int,
    limit: float | None = None,
    interval: float = 1.0,
    evaluated: float = 1.0,
    num_val: int = 0,
    schedule: dict[int, int] | None = None,
) -> Any:
    """Return as much of a trainer as `position_checks` reads. Without a limit, an epoch has all batches.

    num_val: samples of a validation whose loader exists by now.
    """
    parts = batch_ranges(num_val, micro_batch, rank=0, num_ranks=ranks)
    sampler = SampleOrder(range(num_val), parts, seed=1, gives=ARRAYS)
    some = len(sampler) * evaluated if isinstance(evaluated, float) else min(evaluated, len(sampler))
    loader = DataLoader(range(num_val), batch_size=None, sampler=sampler)  # type: ignore[arg-type]
    validated = SimpleNamespace(flattened=[loader]) if num_val else None
    validation = SimpleNamespace(_combined_loader=validated, max_batches=[int(some)])
    loaders = SimpleNamespace(flattened=[SimpleNamespace(batch_size=micro_batch)])
    return SimpleNamespace(
        num_training_batches=per_epoch,
        val_check_batch=every,
        limit_train_batches=1.0 if limit is None else limit,
        val_check_interval=interval,
        limit_val_batches=evaluated,
        limit_test_batches=1.0,
        num_devices=ranks,
        callbacks=[GradientAccumulationScheduler(schedule)] if schedule else [],
        strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": 0}),
        fit_loop=SimpleNamespace(_combined_loader=loaders, epoch_loop=SimpleNamespace(val_loop=validation)),
    )


def resume_at(
    was: int, now: int, then: dict[str, Any], here: dict[str, Any], batches: int = 0, *, other_data: bool = False
) -> None:
    """Resume after so many micro-batches of an epoch, in steps of `now` micro-batches and of `was` before.

    then: per_epoch, every, evaluated, num_val, and ranks and micro_batch if they are not 2 and 4; here: the same, and
    what is typed.
    """
    then, here = ({"ranks": 2, "micro_batch": 4} | facts for facts in (then, here))
    saved = {"accumulate": was, "num_ranks": then["ranks"], "samples": [then["ranks"] * then["micro_batch"]]}
    saved |= {"batches_per_epoch": then["per_epoch"], "validate_every": then["every"], "batches": batches}
    saved |= {"epoch": 0, "between_epochs": batches == 0, "is_fetched": True, "num_fetched": batches + 1, "stepped": 0}
    saved |= {"limits": {"limit_val_batches": then.get("evaluated", 1.0), "limit_test_batches": 1.0}}
    saved["validated"] = position.validation_samples(trainer(**then))
    counter = {"ready": 0, "started": 0, "processed": 0, "completed": 0}
    loops = {
        "epoch_loop.batch_progress": {"total": counter | {"completed": batches}, "current": dict(counter)},
        "epoch_progress": {"total": dict(counter), "current": dict(counter)},
    }
    position_checks.check_position(
        trainer(**here), saved, start=position.set_counters(loops, saved, accumulate=now), other_data=other_data
    )


FEWER = {"per_epoch": 12, "every": 12}
HALF = {"per_epoch": 24, "every": 24, "micro_batch": 2}  # in steps of 4
SAME = {
    "nothing is changed": (2, 2, FEWER, FEWER),
    "steps of half as many micro-batches twice as large": (2, 1, FEWER, {"per_epoch": 6, "every": 6, "micro_batch": 8}),
    "of twice as many half as large": (2, 4, FEWER, {"per_epoch": 24, "every": 24, "micro_batch": 2}),
    "half as many ranks": (2, 4, FEWER, {"per_epoch": 24, "every": 24, "ranks": 1}),
    "limit and interval are converted": (
        3,
        6,
        {"per_epoch": 9, "every": 6},
        {"per_epoch": 18, "every": 12, "limit": 18, "interval": 12, "micro_batch": 2},
    ),
    "as many samples are validated": (2, 4, FEWER | {"evaluated": 3}, HALF | {"evaluated": 6}),
    "as many samples are validated, as is seen": (
        (2, 4, FEWER | {"evaluated": 0.5, "num_val": 80}, HALF | {"evaluated": 0.5, "num_val": 80})
    ),
    "all samples are validated, whatever the limit": (
        (2, 4, FEWER | {"evaluated": 9, "num_val": 16}, HALF | {"evaluated": 9, "num_val": 16})
    ),
    "a limit of validation is lifted": (2, 4, FEWER | {"evaluated": 3}, HALF),
    "a limit of validation, in the same layout": (2, 2, FEWER | {"evaluated": 3}, FEWER | {"evaluated": 0.5}),
    "in the middle of an epoch": (2, 4, FEWER, {"per_epoch": 24, "every": 24, "micro_batch": 2}, 8),
    "a longer epoch, in the same layout": (2, 2, FEWER, {"per_epoch": 20, "every": 20, "limit": 20}, 8),
    "another interval, in the same layout": (2, 2, FEWER, {"per_epoch": 12, "every": 4, "interval": 4}, 8),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_place_is_accepted(case: str) -> None:
    resume_at(*SAME[case])


# Arguments of `resume_at`, then key and fix of the error.
REJECTED = {
    "a limit that counts other micro-batches": (
        (2, 4, FEWER, {"per_epoch": 12, "every": 12, "limit": 12, "micro_batch": 2}),
        "trainer.limit_train_batches",
        "trainer.limit_train_batches=24",
    ),
    "a limit on fewer ranks": (
        (2, 4, FEWER, {"per_epoch": 12, "every": 12, "limit": 12, "ranks": 1}),
        "trainer.limit_train_batches",
        "trainer.limit_train_batches=24",
    ),
    "an interval that counts other micro-batches": (
        (2, 4, {"per_epoch": 12, "every": 6}, {"per_epoch": 24, "every": 6, "interval": 6, "micro_batch": 2}),
        "trainer.val_check_interval",
        "trainer.val_check_interval=12",
    ),
    "a limit that is no whole number of micro-batches now": (
        (2, 1, {"per_epoch": 12, "every": 3}, {"per_epoch": 6, "every": 3, "interval": 3, "micro_batch": 8}),
        "trainer.val_check_interval",
        "trainer.accumulate_grad_batches=2",
    ),
    "an epoch that ends with an incomplete step": (
        (3, 6, {"per_epoch": 10, "every": 10}, {"per_epoch": 20, "every": 20, "micro_batch": 2}),
        "trainer.accumulate_grad_batches",
        "trainer.accumulate_grad_batches=3",
    ),
    "a place behind the end of the epoch": (
        (2, 2, FEWER, {"per_epoch": 4, "every": 4, "limit": 4}, 8),
        "trainer.limit_train_batches",
        "the value that the run had",
    ),
    "a place at the end of the epoch": (
        (2, 2, FEWER, {"per_epoch": 8, "every": 8, "limit": 8}, 8),
        "trainer.limit_train_batches",
        "the value that the run had",
    ),
    "steps of more samples": (
        (2, 2, FEWER, {"per_epoch": 6, "every": 6, "ranks": 4}),
        "trainer.devices",
        "trainer.accumulate_grad_batches=1",
    ),
    "batches of a rank that are as large on fewer ranks": (
        (1, 1, FEWER, {"per_epoch": 24, "every": 24, "ranks": 1}),
        "trainer.devices",
        "trainer.accumulate_grad_batches=2",
    ),
    "steps of more samples in the middle of an epoch": (
        (2, 2, FEWER, {"per_epoch": 6, "every": 6, "ranks": 4}, 8),
        "trainer.devices",
        "trainer.accumulate_grad_batches=1",
    ),
    "steps of more micro-batches": (
        (1, 2, FEWER, FEWER, 4),
        "trainer.accumulate_grad_batches",
        "trainer.accumulate_grad_batches=1",
    ),
    "a schedule of micro-batches that is new": (
        (1, 2, FEWER, FEWER | {"schedule": {0: 2}}, 6),
        "callbacks",
        "a schedule that has 1 in this epoch, as before",
    ),
    "larger batches": (
        (1, 1, FEWER, {"per_epoch": 12, "every": 12, "micro_batch": 6}),
        "data",
        "batches as large as before",
    ),
    "a limit as before, of smaller micro-batches": (
        (2, 4, FEWER | {"limit": 12}, {"per_epoch": 12, "every": 12, "limit": 12, "micro_batch": 2}, 8),
        "trainer.limit_train_batches",
        "trainer.limit_train_batches=24",
    ),
    "an epoch whose last step is incomplete on fewer ranks": (  # 50 samples
        (1, 2, {"per_epoch": 7, "every": 7}, {"per_epoch": 13, "every": 13, "ranks": 1}),
        "trainer.devices",
        "as many devices as before",
    ),
    "fewer samples are validated": (
        (2, 4, FEWER | {"evaluated": 3}, HALF | {"evaluated": 3}),
        "trainer.limit_val_batches",
        "trainer.limit_val_batches=6, or trainer.limit_val_batches=1.0 for all of them",
    ),
    "a last batch of all ranks that is larger now": (  # 17 samples: 8 + 8 + 1 on one rank; 8 and 9 on two
        (
            *(1, 1, FEWER | {"ranks": 1, "micro_batch": 8, "evaluated": 2, "num_val": 17}),
            FEWER | {"evaluated": 2, "num_val": 17},
        ),
        "trainer.limit_val_batches",
        "the layout as before, or trainer.limit_val_batches=1.0 for all of them",
    ),
    "a share of the batches of validation, which are others": (
        (2, 4, FEWER | {"evaluated": 0.5}, HALF | {"evaluated": 0.5}),
        "trainer.limit_val_batches",
        "the layout as before, or trainer.limit_val_batches=1.0 for all of them",
    ),
    "from one rank to several within an epoch": (
        (1, 1, FEWER | {"ranks": 1, "micro_batch": 8}, FEWER, 4),
        "trainer.devices",
        "as many devices as before",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_another_place_is_rejected(case: str) -> None:
    words, key, fix = REJECTED[case]
    with pytest.raises(ConfigError) as caught:
        resume_at(*words)
    assert (caught.value.key, caught.value.fix) == (key, fix)
    for typed in typed_fixes.retyped([], caught.value):
        resume_at(*with_fix(words, key, typed[0]))


def with_fix(words: tuple[Any, ...], key: str, typed: str) -> tuple[Any, ...]:
    """Return the arguments of `resume_at` once a fix is typed."""
    (was, now, then, here, *batches), (name, _, text) = words, typed.partition("=")
    number = float(text) if "." in text else int(text)
    if name == "trainer.accumulate_grad_batches":  # where the global batch size is given, batches are as before, too
        return (was, number, then, here if key == "trainer.devices" else then, *batches)
    facts = {
        "trainer.limit_train_batches": {"limit": number, "per_epoch": number, "every": number},
        "trainer.val_check_interval": {"interval": number, "every": number},
        "trainer.limit_val_batches": {"evaluated": number},
    }
    return (was, now, then, here | facts[name], *batches)


# Data changed on purpose


def test_an_epoch_that_other_data_have_shortened_is_not_reported_as_a_limit() -> None:
    for batches in (6, 8):
        with pytest.raises(ConfigError) as caught:
            resume_at(2, 2, FEWER, {"per_epoch": 6, "every": 6}, batches, other_data=True)
        assert (caught.value.key, "now it has 6" in caught.value.rule) == ("data", True)
        assert "data as they were until this epoch has ended" in caught.value.fix
    resume_at(2, 2, FEWER, {"per_epoch": 6, "every": 6}, 4, other_data=True)
    resume_at(2, 2, FEWER, {"per_epoch": 6, "every": 6}, other_data=True)


def test_with_other_data_only_typed_limits_are_compared() -> None:
    fewer = {"per_epoch": 20, "every": 20, "micro_batch": 2}  # twice the micro-batches of 10
    resume_at(2, 4, FEWER, fewer, other_data=True)
    with pytest.raises(ConfigError, match=r"trainer\.limit_train_batches=24"):
        resume_at(2, 4, FEWER, fewer | {"per_epoch": 12, "every": 12, "limit": 12}, other_data=True)


def test_the_loader_that_is_made_decides_the_batch_size_that_is_told() -> None:
    made = trainer(per_epoch=9, every=9, ranks=4, micro_batch=8)
    made.accumulate_grad_batches, made.current_epoch = 2, 0
    told = "batch size: 8 on each device * 4 devices * 2 accumulated = 64"
    assert [position.describe_batch_size(made, configured=size) for size in (8, None)] == [told, told]
    made.accumulate_grad_batches, made.fit_loop._combined_loader.flattened[0].batch_size = 1, 2
    differs = ", as the data's loader has it; the config says 8 on each device"
    assert position.describe_batch_size(made, configured=8) == f"batch size: 2 on each device * 4 devices = 8{differs}"
    made.fit_loop._combined_loader.flattened.append(SimpleNamespace(batch_size=None))
    assert "as the loaders of the data have it" in position.describe_batch_size(made, configured=8)
