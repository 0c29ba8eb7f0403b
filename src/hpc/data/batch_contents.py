"""The size of a batch of any kind: a nest of tensors, or an object that holds some."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# By which batches of graphs say how many they hold (PyTorch Geometric and DGL).
COUNTS = ("num_graphs", "batch_size")
MAX_DEPTH = 3  # of objects in objects


@dataclass(frozen=True)
class BatchSize:
    """The number of samples, and of tokens if the batch is text."""

    num_samples: int
    num_units: int
    unit: str  # "samples" or "tokens"
    sample_shape: tuple[float, ...]  # of the first tensor; alike for all batches if their costs per sample are alike


def measure_batch(batch: Any) -> BatchSize | None:
    """Return the size of a batch by its first tensor that has a dimension of samples; None if there is none.

    Integers of two dimensions (samples, time) count as tokens.
    """
    inputs = first_tensor(batch)
    if inputs is None:
        return None
    if count := _declared_count(batch):
        return BatchSize(count, count, "samples", (inputs.numel() / count,))
    if inputs.dtype == torch.int64 and inputs.ndim == 2:
        return BatchSize(len(inputs), inputs.numel(), "tokens", tuple(inputs.shape[1:]))
    return BatchSize(len(inputs), len(inputs), "samples", tuple(inputs.shape[1:]))


def first_tensor(batch: Any) -> Tensor | None:
    """Return the first tensor of a batch that has a dimension of samples; None if there is none."""
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor) and batch[0].ndim:
        return batch[0]  # nearly every batch
    return next((tensor for tensor in iterate_tensors(batch) if tensor.ndim), None)


def iterate_tensors(value: Any, depth: int = MAX_DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in a nest of containers and objects.

    Args:
        depth: how deep to look into attributes of objects.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from iterate_tensors(item, depth)
    elif depth and not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from iterate_tensors(vars(value), depth - 1)


def _declared_count(batch: Any) -> int | None:
    """Return how many samples an object says that it holds; None if it does not say so."""
    if isinstance(batch, Tensor | tuple | list | Mapping):
        return None
    counts = (getattr(batch, name, None) for name in COUNTS)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)
