"""A mean over all ranks that does not depend on their number."""

from typing import Any

import torch
from torchmetrics import MeanMetric


def precise_mean() -> Any:
    """Return a metric. Summed in single precision it would depend on the number of ranks, and miscount many tokens."""
    return MeanMetric().set_dtype(torch.float64)
