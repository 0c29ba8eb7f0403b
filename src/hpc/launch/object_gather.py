"""Give an object of each rank to all of them."""

from typing import Any


def all_gather_objects(value: Any) -> list[Any]:
    """Return the values of all processes, in the order of their ranks. All of them call this."""
    import torch.distributed as dist  # only a run that trains has it

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
