"""Checks of one value of the config, each of which raises `ConfigError` with a value to type instead."""

import math

from hpc.config.errors import ConfigError, closest_word


def require_one_of(key: str, value: str, *, choices: list[str]) -> None:
    """Raise `ConfigError` unless the value is one of the choices."""
    if value not in choices:
        fix = f"{key}={closest_word(value, choices, choices[0])}"
        raise ConfigError(key, value, f"must be one of {', '.join(choices)}", fix)


def require_at_least(key: str, value: float, *, minimum: int) -> None:
    """Raise `ConfigError` if the value is below the minimum."""
    if value < minimum:
        raise ConfigError(key, value, f"must be at least {minimum}", f"{key}={max(minimum, 1)}")


def require_at_most(key: str, value: float, *, maximum: int) -> None:
    """Raise `ConfigError` if the value is above the maximum."""
    if value > maximum:
        raise ConfigError(key, value, f"must be at most {maximum}", f"{key}={maximum}")


def require_positive(key: str, value: float) -> None:
    """Raise `ConfigError` unless the value is finite and above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(key, value, "must be a finite number above 0", f"{key}=10")
