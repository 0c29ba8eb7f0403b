"""Where an axis has its ticks, and how numbers are written beside them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = 1e40  # of what is drawn, above all that fp32 holds; more is a damaged number
SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with the ticks between and what stands beside each."""

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]

    def at(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis(values: Sequence[float], most: int, log: bool = False, to_ticks: bool = False) -> Axis:
    """For values that can be drawn (`drawable`).

    Args:
        most: about so many ticks.
        to_ticks: begin and end at a tick instead of at the data; on a linear axis at 0 if that is near.
    """
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # one value: room around it
        margin = 0.1 * abs(low) or 1.0
        low, high = (low / 2, high * 2) if log else (low - margin, high + margin)
    elif to_ticks and not log and 0 < low < high / 2:
        low = 0.0
    if log:
        ticks = _log_ticks(low, high, most, all(math.log2(value).is_integer() for value in values))
        names = [power_of_two(tick) if tick >= 1 and math.log2(tick).is_integer() else number(tick) for tick in ticks]
    else:
        ticks, step = _linear_ticks(low, high, most)
        names = _names(ticks, step)
    if to_ticks:
        ends = _fine(low, high) if log else ticks
        low = max((end for end in ends if end <= low), default=low)  # none: a dust of a number below 0
        high = min((end for end in ends if end >= high), default=high)
    inside = [(tick, name) for tick, name in zip(ticks, names, strict=True) if low <= tick <= high]
    return Axis(low, high, log, inside)


def drawable(value: float, log: bool) -> bool:
    """Not so: no number, absurdly large, or without a logarithm."""
    return (1 / LARGEST if log else -LARGEST) < value < LARGEST


def number(value: float) -> str:
    """Four digits at most: 0.0003, 12.5, 9876, 12.3k, 4.56M."""
    if not math.isfinite(value):
        return str(value)
    for factor, suffix in SUFFIXES if abs(value) < 1e16 else ():
        if abs(value) >= max(factor, 9999.5):
            return f"{value / factor:.3g}{suffix}"
    text = f"{value:.0f}" if 999.5 <= abs(value) < 1e16 else f"{value:.3g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def power_of_two(value: float) -> str:
    """Nodes as they are, bytes as 16Ki."""
    for factor, suffix in BINARY:
        if value >= max(factor, 10_000):
            return f"{value / factor:.0f}{suffix}"
    return f"{value:.0f}"


def _linear_ticks(low: float, high: float, most: int) -> tuple[list[float], float]:
    """Multiples of 1, 2 or 5 times a power of ten that reach from below `low` to above `high`."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)], step


def _log_ticks(low: float, high: float, most: int, of_two: bool) -> list[float]:
    """Powers of two where all values are; else of ten, with 2 and 5 between if there is room."""
    base = 2.0 if of_two else 10.0
    if not of_two and sum(low <= tick <= high for tick in _fine(low, high)) <= most:
        return _fine(low, high)
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    every = math.ceil((last - first + 1) / most)
    return [base**power for power in range(first, last + every, every)]


def _fine(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from below `low` to above `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in (1, 2, 5)]


def _names(ticks: Sequence[float], step: float) -> list[str]:
    """All with the same suffix and as many decimals as tell neighbours apart."""
    largest = max(map(abs, ticks))
    factor, suffix = next((pair for pair in SUFFIXES if largest >= max(pair[0], 9999.5)), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / factor) + 1e-9))
    if decimals > 4:
        return [number(tick) for tick in ticks]
    return [f"{tick / factor:.{decimals}f}{suffix}" if tick else "0" for tick in ticks]
