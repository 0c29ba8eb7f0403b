"""A mean over all ranks that does not depend on their number."""

from typing import Any

import torch
from torchmetrics import MeanMetric


def make_float64_mean_metric() -> Any:
    """Return a float64 MeanMetric: a float32 sum depends on the number of ranks and loses large token counts."""
    return MeanMetric().set_dtype(torch.float64)
