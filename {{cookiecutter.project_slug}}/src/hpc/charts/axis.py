"""The range and the ticks of an axis, and the labels beside them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DRAWN_VALUE = 1e40  # the largest value that is drawn. It is above all that fp32 holds; more is a damaged number.
DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BINARY = ((2.0**40, "Ti"), (2.0**30, "Gi"), (2.0**20, "Mi"), (2.0**10, "Ki"))


@dataclass(frozen=True)
class Axis:
    """An axis from `low` to `high`, with ticks between them: (value, label)."""

    low: float
    high: float
    log: bool
    ticks: list[tuple[float, str]]

    def position(self, value: float) -> float:
        """Return where a value lies: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def make_axis(values: Sequence[float], max_ticks: int, *, log: bool = False, to_ticks: bool = False) -> Axis:
    """Return an axis that holds all values, each of which is drawable (`is_drawable`).

    Args:
        max_ticks: about how many ticks it has at most.
        to_ticks: begin and end at a tick instead of at the data; a linear axis begins at 0 if that is near.
    """
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a single value: leave room around it
        margin = 0.1 * abs(low) or 1.0
        low, high = (low / 2, high * 2) if log else (low - margin, high + margin)
    elif to_ticks and not log and 0 < low < high / 2:
        low = 0.0
    if log:
        binary = all(math.log2(value).is_integer() for value in values)
        ticks = _log_ticks(low, high, max_ticks=max_ticks, binary=binary)
        labels = [_log_label(tick) for tick in ticks]
    else:
        ticks, step = _linear_ticks(low, high, max_ticks=max_ticks)
        labels = _linear_labels(ticks, step)
    if to_ticks:
        ends = _ticks_1_2_5(low, high) if log else ticks
        low = max((end for end in ends if end <= low), default=low)  # rounding may leave no tick below a tiny number
        high = min((end for end in ends if end >= high), default=high)
    inside = [(tick, label) for tick, label in zip(ticks, labels, strict=True) if low <= tick <= high]
    return Axis(low, high, log, inside)


def is_drawable(value: float, log: bool) -> bool:
    """Return False for NaN, infinite and absurdly large values, and for those without a logarithm if `log`."""
    return (1 / MAX_DRAWN_VALUE if log else -MAX_DRAWN_VALUE) < value < MAX_DRAWN_VALUE


def format_number(value: float) -> str:
    """Format a number with four digits at most: 0.0003, 12.5, 9876, 12.3k, 4.56M."""
    if not math.isfinite(value):
        return str(value)
    for factor, suffix in DECIMAL if abs(value) < 1e16 else ():
        if abs(value) >= max(factor, 9999.5):
            return f"{value / factor:.3g}{suffix}"
    text = f"{value:.0f}" if 999.5 <= abs(value) < 1e16 else f"{value:.3g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _log_label(tick: float) -> str:
    return _format_binary(tick) if tick >= 1 and math.log2(tick).is_integer() else format_number(tick)


def _format_binary(value: float) -> str:
    """Format a power of two: 1024 (nodes) as it is, 16384 (bytes) as 16Ki."""
    for factor, suffix in BINARY:
        if value >= max(factor, 10_000):
            return f"{value / factor:.0f}{suffix}"
    return f"{value:.0f}"


def _linear_ticks(low: float, high: float, *, max_ticks: int) -> tuple[list[float], float]:
    """Return ticks from below `low` to above `high`, and their step: 1, 2 or 5 times a power of ten."""
    least = (high - low) / max_ticks
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    return [index * step for index in range(first, last + 1)], step


def _log_ticks(low: float, high: float, *, max_ticks: int, binary: bool) -> list[float]:
    """Return powers of two if `binary`, else powers of ten, with 2 and 5 between if there is room."""
    base = 2.0 if binary else 10.0
    if not binary and sum(low <= tick <= high for tick in _ticks_1_2_5(low, high)) <= max_ticks:
        return _ticks_1_2_5(low, high)
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    every = math.ceil((last - first + 1) / max_ticks)
    return [base**power for power in range(first, last + every, every)]


def _ticks_1_2_5(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten from below `low` to above `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [factor * 10.0**power for power in powers for factor in (1, 2, 5)]


def _linear_labels(ticks: Sequence[float], step: float) -> list[str]:
    """Format all ticks with the same suffix, and with as many decimals as tell neighbours apart."""
    largest = max(map(abs, ticks))
    factor, suffix = next((pair for pair in DECIMAL if largest >= max(pair[0], 9999.5)), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / factor) + 1e-9))
    if decimals > 4:
        return [format_number(tick) for tick in ticks]
    return [f"{tick / factor:.{decimals}f}{suffix}" if tick else "0" for tick in ticks]
