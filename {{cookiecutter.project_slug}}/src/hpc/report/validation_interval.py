"""The override that makes a run validate less often. Pure."""

from collections.abc import Mapping
from math import ceil
from typing import Any

from hpc.report.run_statistics import RunStatistics, config_value

TARGET_SHARE = 0.05  # of the time of the run, for validation


def less_frequent_validation(share: float, statistics: RunStatistics, config: Mapping[str, Any]) -> str | None:
    """Return the override after which validation takes TARGET_SHARE; None if it cannot be less frequent.

    Args:
        share: of the time of the run that validation takes now.
    """
    factor, key = max(ceil(share / TARGET_SHARE), 2), "trainer.val_check_interval"
    interval, longest = config_value(config, key), _max_batches(statistics, config)
    if isinstance(interval, float) and 0 < interval < 1:  # a share of an epoch
        return f"++{key}={min(interval * factor, 1.0):.3}"
    if not isinstance(interval, int):
        key = "trainer.check_val_every_n_epoch"
        interval, epochs = config_value(config, key) or 1, config_value(config, "trainer.max_epochs")
        longest = epochs if isinstance(epochs, int) and epochs > 0 else None
    factor = min(factor, longest // max(interval, 1)) if longest else factor
    # The shipped configs lack these keys of Lightning. Hydra adds a new key with +, and a new or an old one with ++.
    plus = "++" if config_value(config, key) is not None else "+"
    return f"{plus}{key}={interval * factor}" if factor > 1 else None


def _max_batches(statistics: RunStatistics, config: Mapping[str, Any]) -> int | None:
    """Return the longest interval that makes sense, in batches.

    Lightning rejects one that is longer than an epoch, and with one that is longer than the run nothing is validated.
    """
    counts = (config_value(config, "trainer.max_steps"), statistics.steps_per_epoch)
    steps = [count for count in counts if isinstance(count, int) and count > 0]
    accumulate = config_value(config, "trainer.accumulate_grad_batches")
    return min(steps) * (accumulate if isinstance(accumulate, int) else 1) if steps else None
