"""Figures of a node's GPUs, as torch reads them from the driver (NVML, AMD SMI)."""

from collections import defaultdict
from collections.abc import Callable

import torch


def read_gpus(num_gpus: int) -> tuple[dict[str, float | None], dict[str, list[str]]]:
    """Return the figures of the first GPUs that this process sees, in torch's order.

    Returns:
        Values by column, such as gpu0_watts, None if it cannot be read; and such columns by their error.
    """
    figures: dict[str, float | None] = {}
    errors: dict[str, list[str]] = defaultdict(list)
    for index in range(num_gpus):
        for metric, read in READERS.items():
            column = f"gpu{index}_{metric}"
            try:
                figures[column] = float(read(index))
            except Exception as error:  # each driver has errors of its own; AMD's writes N/A for what it does not know
                figures[column] = None
                errors[str(error) or type(error).__name__].append(column)
    return figures, errors


def _watts(index: int) -> float:
    power = torch.cuda.power_draw(index)  # milliwatts; of AMD's GPUs watts, and 0 if their driver does not know it
    if torch.version.hip and not power:
        raise ValueError("the driver does not know the power")
    return power if torch.version.hip else power / 1000


READERS: dict[str, Callable[[int], float]] = {
    "percent": lambda index: torch.cuda.utilization(index),
    "memory_gb": lambda index: torch.cuda.device_memory_used(index) / 1e9,
    "watts": _watts,
    "celsius": lambda index: torch.cuda.temperature(index),
}
