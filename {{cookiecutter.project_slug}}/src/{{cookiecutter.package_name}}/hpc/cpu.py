"""All that differs on CPU: gloo instead of NCCL, and a DeepSpeed strategy that does not insist on CUDA.

DDP, FSDP2 and tensor parallelism run the very same code on CPU and GPU. DeepSpeed itself runs on CPU too; only its
Lightning strategy refuses. A laptop and the tests therefore train with the real thing.
"""

import os

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy


class DeepSpeed(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, on CUDA as it is, on CPU with that one check lifted."""

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            return super().setup_environment()
        # DeepSpeed reads this when it is first asked for its accelerator, and would otherwise look for a GPU.
        os.environ["DS_ACCELERATOR"] = "cpu"
        # DeepSpeed wants an index on each device; Lightning's CPU devices have none.
        self.parallel_devices = [torch.device("cpu", i) for i in range(self.num_processes)]
        return super(DeepSpeedStrategy, self).setup_environment()
