"""Measure the peak memory of a plain loop in Lightning's order, by torch's tracker without a GPU or on a GPU."""

from functools import partial
from typing import Any
from unittest import mock

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from hpc.config import build
from hpc.plan.setup import ParallelLayout

WIDE = ("layer_norm", "group_norm", "cross_entropy")  # CUDA's autocast computes these in fp32, and the CPU's does not
STEPS = 2  # the optimizer has its state from the second step on


def tracked(cfg: DictConfig, setup: ParallelLayout) -> int:
    """Return peak bytes of fake tensors, which need no memory: models of any size work on any machine."""
    wide = {name: partial(_in_fp32, getattr(F, name)) for name in WIDE}
    with mock.patch.multiple(F, **wide), FakeTensorMode():
        network, optimizer, inputs = _made(cfg, setup, "cpu")
        tracker = MemTracker()
        tracker.track_external(network, optimizer, inputs)
        with tracker:
            for _ in range(STEPS):
                _step(network, optimizer, inputs, setup)
                tracker.reset_mod_stats()
        (device,) = tracker.get_tracker_snapshot("peak").values()
    return next(size for kind, size in device.items() if "Total" in str(kind))


def on_gpu(cfg: DictConfig, setup: ParallelLayout) -> int:
    """Return peak bytes of tensors, as CUDA's allocator counts them. Raises torch.OutOfMemoryError."""
    torch.cuda.reset_peak_memory_stats()
    network, optimizer, inputs = _made(cfg, setup, "cuda")
    for _ in range(STEPS):
        _step(network, optimizer, inputs, setup)
    return torch.cuda.max_memory_allocated()


def _made(cfg: DictConfig, setup: ParallelLayout, device: str) -> tuple[Any, Optimizer, Tensor]:
    torch.set_default_dtype(torch.bfloat16 if setup.precision == "bf16-true" else torch.float32)
    try:
        with torch.device(device):
            network = build.build(cfg.model.network).train()
            inputs = network.example_input(setup.micro_batch)
    finally:
        torch.set_default_dtype(torch.float32)
    for block in network.blocks if setup.checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return network, build.build(cfg.model.optimizer)(network.parameters()), inputs


def _step(network: Any, optimizer: Optimizer, inputs: Tensor, setup: ParallelLayout) -> None:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=setup.precision == "bf16-mixed"):
        logits = network(inputs).flatten(0, -2)
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=inputs.device))
        del logits
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _in_fp32(function: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return function(tensor.float() if torch.is_autocast_enabled("cpu") else tensor, *args, **kwargs)
