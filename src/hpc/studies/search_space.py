"""The space of a search: overrides in Hydra's syntax for sweeps, read as ranges and choices. Pure; no optuna."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, RangeSweep

from hpc.config.errors import ConfigError
from hpc.studies import sweep

MAX_CORNERS = 32  # that are checked: each takes some hundredths of a second
EXAMPLE = "'{key}=tag(log, interval(1e-4, 1e-1))'"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers if `low` is one."""

    low: float
    high: float
    step: int = 1  # between integers
    log: bool = False

    @property
    def corner_values(self) -> tuple[str, ...]:
        return (repr(self.low), repr(self.high))


@dataclass(frozen=True)
class Choice:
    """Values without an order, each as it is written on a command line."""

    values: tuple[str, ...]

    @property
    def corner_values(self) -> tuple[str, ...]:
        return self.values


Space = dict[str, Range | Choice]  # by the key of the override


def parse_space(overrides: Sequence[str]) -> Space:
    """Return the keys that these overrides leave open, with their ranges and choices.

    Raises:
        ConfigError: no key is open, an open key is given twice, or the ends of a range are not numbers.
    """
    space: Space = {}
    for override in overrides:
        key = override.partition("=")[0]
        if (dimension := _parse_dimension(override)) is None:
            continue
        if sum(other.partition("=")[0] == key for other in overrides) > 1:
            raise ConfigError(override, None, "A key that is searched must not be given twice", "one of the two")
        space[key] = dimension
    if not space:
        rule = "must be given at least one key with an interval, a range or several values to choose from"
        raise ConfigError("--search", None, rule, EXAMPLE.format(key="model.optimizer.lr"))
    return space


def fill_in(overrides: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return the overrides of one run: the open keys have these values."""
    keys = [override.partition("=")[0] for override in overrides]
    return [
        f"{key}={values[key]}" if key in values else override for key, override in zip(keys, overrides, strict=True)
    ]


def list_corners(space: Space) -> list[dict[str, str]]:
    """Return all combinations of the ends of each range and all choices; if these are too many, each end once."""
    ends = [dimension.corner_values for dimension in space.values()]
    if math.prod(map(len, ends)) <= MAX_CORNERS:
        corners = list(product(*ends))
    else:
        corners = [tuple(values[number % len(values)] for values in ends) for number in range(max(map(len, ends)))]
    return [dict(zip(space, corner, strict=True)) for corner in corners]


def _parse_dimension(override: str) -> Range | Choice | None:
    """Return what an override leaves open; None if it sets a single value. Raises `ConfigError`."""
    parsed, key = sweep.parse_override(override), override.partition("=")[0]
    example = f"'{key}=range(2, 9)'" if "range(" in override else EXAMPLE.format(key=key)
    if parsed is None and re.search(r"=.*\b(interval|range)\(", override):
        raise ConfigError(override, None, "The ends of an interval or a range must be numbers", example)
    if parsed is None or not parsed.is_sweep_override():
        return None
    value = parsed.value()
    tags = getattr(value, "tags", set())
    if tags - {"log"} or (tags and not isinstance(value, IntervalSweep)):
        rule = "The only tag is log, and it must belong to an interval(low, high)"
        raise ConfigError(override, None, rule, example)
    if getattr(value, "shuffle", False):
        raise ConfigError(override, None, "A search cannot be shuffled: it draws its values", "leave shuffle out")
    if isinstance(value, IntervalSweep):
        return _range_of_interval(override, value)
    if isinstance(value, RangeSweep) and isinstance(value.start, int) and isinstance(value.step, int):
        numbers = sorted(range(value.start, value.stop, value.step))  # type: ignore[arg-type]
        if numbers:
            return Range(numbers[0], numbers[-1], abs(value.step))
    elif isinstance(value, ChoiceSweep | RangeSweep) and (choices := sweep.list_choices(override)):
        return Choice(tuple(choice.partition("=")[2] for choice in choices))
    elif isinstance(value, Glob):
        raise ConfigError(override, None, "A search must list its choices and has no glob", "choice(one, another)")
    raise ConfigError(override, None, "A range must not be empty", "range(start, stop, step), where stop is excluded")


def _range_of_interval(override: str, interval: IntervalSweep) -> Range:
    low, high, example = interval.start, interval.end, EXAMPLE.format(key=override.partition("=")[0])
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(override, None, "An interval must go from a finite number to a larger one", example)
    if "log" in interval.tags and low <= 0:
        raise ConfigError(override, None, "A logarithmic interval must begin above 0", example)
    return Range(low, high, log="log" in interval.tags)
