"""Numbers as sentences and tables write them, so that a number looks the same in both."""


def format_percent(share: float) -> str:
    """Format a share of 1: 0.5 as "50 %", 0.031 as "3.1 %"."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def format_seconds(value: float) -> str:
    """Format a duration: 3.2 ms, 45 s, 12 min, 3.4 h, 5 days."""
    for limit, factor, unit in ((0.9995, 1000, "ms"), (119.5, 1, "s"), (7200, 1 / 60, "min"), (172_800, 1 / 3600, "h")):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value / 86400:.3g} days"


def format_energy(joules: float) -> str:
    """Format an energy: 12.3 Wh, 4.56 kWh, 1.23 MWh."""
    watt_hours = joules / 3600
    for limit, factor, unit in ((999.5, 1, "Wh"), (999_500, 1e-3, "kWh")):
        if watt_hours < limit:
            return f"{watt_hours * factor:.3g} {unit}"
    return f"{watt_hours / 1e6:.3g} MWh"


def format_si(value: float) -> str:
    """Format a number with three digits and an SI prefix: 12345 as "12.3 k"."""
    prefixes = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")]
    fitting = ((size, prefix) for size, prefix in prefixes if 0.9995 * size <= abs(value) < 1e15)
    size, prefix = next(fitting, (1.0, ""))
    return f"{value / size:.3g} {prefix}".strip()
