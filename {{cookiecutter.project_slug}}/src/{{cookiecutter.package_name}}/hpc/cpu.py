"""All that differs on CPU: gloo instead of NCCL, and a DeepSpeed strategy that does not insist on CUDA.

DDP, FSDP2 and tensor parallelism run the very same code on CPU and GPU. DeepSpeed itself runs on CPU too; only its
Lightning strategy refuses. A laptop and the tests therefore train with the real thing.
"""

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy


class DeepSpeed(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, on CUDA as it is, on CPU with that one check lifted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Offloaded state is updated by the optimizer the config names. DeepSpeed's own CPU optimizer would be compiled
        # at first use, on a compute node.
        assert isinstance(self.config, dict)
        self.config["zero_force_ds_cpu_optimizer"] = False

    def setup_environment(self) -> None:
        if not isinstance(self.accelerator, CPUAccelerator):
            return super().setup_environment()
        # DeepSpeed reads this when it is first asked for its accelerator, and would otherwise look for a GPU.
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.ops

        # Its all-reduce through shared memory would be compiled at first use, and a job killed meanwhile would leave a
        # lock that hangs all later ones. gloo does as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed wants an index on each device; Lightning's CPU devices have none.
        self.parallel_devices = [torch.device("cpu", i) for i in range(self.num_processes)]
        return super(DeepSpeedStrategy, self).setup_environment()
