"""What one more method of a module or its data would unlock. docs/bring-your-own.md has the same as a table."""

from collections.abc import Iterator
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden

from hpc.strategies.blocks import find_blocks


def unlocks(module: L.LightningModule, data: Any) -> Iterator[tuple[str, str]]:
    """Yield what a module and its data lack, and what it would unlock."""
    if not is_overridden("validation_step", module):
        yield "validation_step, which calls self.log", "a validation; with checkpoint.monitor=NAME, the best checkpoint"
    if not is_overridden("test_step", module):
        yield "test_step", "a test at the end of training, and task=test"
    elif isinstance(data, L.LightningDataModule) and not is_overridden("test_dataloader", data):
        yield "test_dataloader, in the DataModule", "a test at the end of training, and task=test"
    if isinstance(data, L.LightningDataModule) and not is_overridden("predict_dataloader", data):
        yield "predict_dataloader, in the DataModule", "task=predict"
    blocks = find_blocks(module)
    if blocks is None:
        yield (
            "a torch.nn.ModuleList or Sequential of equal layers",
            "fsdp that gathers one layer at a time, and strategy.activation_checkpointing=true",
        )
    if not any(hasattr(part, "tensor_parallel_plan") for part in module.modules()):
        yield "tensor_parallel_plan(), as in models/gpt.py", "strategy.tensor_parallel_size=, for wide layers"
    if not hasattr(module, "example_batch"):
        yield "example_batch(num_examples), which returns a blank batch", "plans on a machine that lacks the data"
