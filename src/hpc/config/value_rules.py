"""Rules on one value of the config. Each returns the `ConfigError` of a value that breaks it, and None of others.

None passes all of them: the type of a key says whether it may be null.
"""

import math
from collections.abc import Sequence
from typing import Any

from hpc.config.errors import ConfigError, closest_word


def one_of(key: str, value: Any, choices: Sequence[str]) -> ConfigError | None:
    """Return an error unless the value is one of the choices."""
    if value is None or value in choices:
        return None
    fix = f"{key}={closest_word(str(value), choices, choices[0])}"
    return ConfigError(key, value, f"must be one of {', '.join(choices)}", fix)


def at_least(key: str, value: float | None, minimum: int) -> ConfigError | None:
    """Return an error if the value is below the minimum."""
    if value is None or value >= minimum:
        return None
    return ConfigError(key, value, f"must be at least {minimum}", f"{key}={max(minimum, 1)}")


def at_most(key: str, value: float | None, maximum: int) -> ConfigError | None:
    """Return an error if the value is above the maximum."""
    if value is None or value <= maximum:
        return None
    return ConfigError(key, value, f"must be at most {maximum}", f"{key}={maximum}")


def positive(key: str, value: float | None) -> ConfigError | None:
    """Return an error unless the value is finite and above 0."""
    if value is None or (value > 0 and math.isfinite(value)):
        return None
    return ConfigError(key, value, "must be a finite number above 0", f"{key}=10")
