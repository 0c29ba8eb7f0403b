"""What a search may choose from: words in Hydra's grammar of sweeps, read as ranges and choices. Pure; no optuna."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, RangeSweep

from hpc.config.errors import ConfigError
from hpc.studies import sweep

MOST = 32  # corners that are looked at: each takes some hundredths of a second
EXAMPLE = "'model.optimizer.lr=tag(log, interval(1e-4, 1e-1))'"


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; whole ones where `low` is an int."""

    low: float
    high: float
    step: int = 1  # of whole numbers
    log: bool = False

    @property
    def ends(self) -> tuple[str, ...]:
        return (repr(self.low), repr(self.high))


@dataclass(frozen=True)
class Choice:
    """Values without an order, each as one would type it."""

    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        return self.values


Space = dict[str, Range | Choice]  # by what stands before the `=`


def of(words: Sequence[str]) -> Space:
    """Return what the words leave open.

    Raises:
        ConfigError: that is nothing, a key is given twice, or a range is not one of numbers.
    """
    found: Space = {}
    for word in words:
        key = word.partition("=")[0]
        if (asked := _asked(word)) is None:
            continue
        if sum(other.partition("=")[0] == key for other in words) > 1:
            raise ConfigError(word, None, "this key is typed twice, and one of them is searched", "one of the two")
        found[key] = asked
    if not found:
        raise ConfigError("--search", None, "no key has an interval, a range or several values to choose from", EXAMPLE)
    return found


def filled(words: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The words of one run: what they leave open has these values."""
    keys = [word.partition("=")[0] for word in words]
    return [f"{key}={values[key]}" if key in values else word for key, word in zip(keys, words, strict=True)]


def corners(space: Space) -> list[dict[str, str]]:
    """Both ends of each range and all choices, in all combinations; where these are too many, each value once."""
    sides = [asked.ends for asked in space.values()]
    if math.prod(map(len, sides)) <= MOST:
        found = list(product(*sides))
    else:
        found = [tuple(side[number % len(side)] for side in sides) for number in range(max(map(len, sides)))]
    return [dict(zip(space, values, strict=True)) for values in found]


def _asked(word: str) -> Range | Choice | None:
    """None: the word says what it means."""
    parsed = sweep.parsed(word)
    if parsed is None and re.search(r"=.*\b(interval|range)\(", word):
        raise ConfigError(word, None, "the ends of an interval, and of a range, are numbers", EXAMPLE)
    if parsed is None or not parsed.is_sweep_override():
        return None
    asked = parsed.value()
    tags = getattr(asked, "tags", set())
    if tags - {"log"} or (tags and not isinstance(asked, IntervalSweep)):
        raise ConfigError(word, None, "the one tag is log, and it goes with interval(low, high)", EXAMPLE)
    if getattr(asked, "shuffle", False):
        raise ConfigError(word, None, "a search shuffles by itself", "without shuffle")
    if isinstance(asked, IntervalSweep):
        return _interval(word, asked)
    if isinstance(asked, RangeSweep) and isinstance(asked.start, int) and isinstance(asked.step, int):
        numbers = sorted(range(asked.start, asked.stop, asked.step))  # type: ignore[arg-type]
        if numbers:
            return Range(numbers[0], numbers[-1], abs(asked.step))
    elif isinstance(asked, ChoiceSweep | RangeSweep) and (values := sweep.choices(word)):
        return Choice(tuple(value.partition("=")[2] for value in values))
    elif isinstance(asked, Glob):
        raise ConfigError(word, None, "a search knows no glob", "choice(one, another)")
    raise ConfigError(word, None, "is empty", "range(start, stop, step), without stop itself")


def _interval(word: str, asked: IntervalSweep) -> Range:
    low, high = asked.start, asked.end
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(word, None, "goes from a number to a larger one", EXAMPLE)
    if "log" in asked.tags and low <= 0:
        raise ConfigError(word, None, "a logarithm begins above 0", EXAMPLE)
    return Range(low, high, log="log" in asked.tags)
