"""Names of parameters or buffers in a message."""

from collections.abc import Sequence

MAX_NAMES = 4


def join_names(names: Sequence[str]) -> str:
    """Join the first names by commas, and say how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
