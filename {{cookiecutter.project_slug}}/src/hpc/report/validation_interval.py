"""Which override makes a run validate less often. Pure."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from hpc.report.numbers import Numbers, value


def rarer(share: float, numbers: Numbers, config: Mapping[str, Any]) -> str | None:
    """Validation so much less often that 5 % of the time is left for it; None where it is rare already."""
    times, key = max(ceil(share / 0.05), 2), "trainer.val_check_interval"
    batches, most = value(config, key), _batches(numbers, config)
    if isinstance(batches, float) and 0 < batches < 1:  # of an epoch
        return f"++{key}={min(batches * times, 1.0):.3}"
    if not isinstance(batches, int):
        key, batches = "trainer.check_val_every_n_epoch", value(config, "trainer.check_val_every_n_epoch") or 1
        epochs = value(config, "trainer.max_epochs")
        most = epochs if isinstance(epochs, int) and epochs > 0 else None
    times = min(times, most // max(batches, 1)) if most else times
    # Lightning's keys are not in the shipped configs: Hydra takes + for one that is new, ++ also for one that is there.
    return f"{'++' if value(config, key) is not None else '+'}{key}={batches * times}" if times > 1 else None


def _batches(numbers: Numbers, config: Mapping[str, Any]) -> int | None:
    """Of an epoch, or of the run: Lightning rejects an interval beyond the one, and beyond the other it is none."""
    steps = [some for some in (value(config, "trainer.max_steps"), numbers.steps) if isinstance(some, int) and some > 0]
    accumulate = value(config, "trainer.accumulate_grad_batches")
    return min(steps) * (accumulate if isinstance(accumulate, int) else 1) if steps else None
