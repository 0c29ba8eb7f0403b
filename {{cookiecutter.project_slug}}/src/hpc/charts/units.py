"""How sentences and tables write numbers, so that one and the same number looks the same in both."""


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def seconds(value: float) -> str:
    """3.2 ms, 45 s, 12 min, 3.4 h."""
    for limit, factor, unit in ((0.9995, 1000, "ms"), (119.5, 1, "s"), (7200, 1 / 60, "min"), (172_800, 1 / 3600, "h")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 86400:.3g} days"


def energy(joules: float) -> str:
    """In kWh, or in Wh where that is less than one."""
    hours = joules / 3600
    return f"{hours / 1000:.3g} kWh" if hours >= 1000 else f"{hours:.3g} Wh"


def si(value: float) -> str:
    """With three digits: 12345 as 12.3 k."""
    prefixes = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
    size, prefix = next(((size, prefix) for size, prefix in prefixes if value >= size), (1.0, ""))
    return f"{value / size:.3g} {prefix}".strip()
