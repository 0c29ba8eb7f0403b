"""The floating-point operations of a training step, counted without a device, without memory, and without a trace."""

import sys
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint
from torch.utils.flop_counter import flop_registry

from hpc.privates.torch import TorchDispatchMode, operation_packet
from hpc.training import dry_run
from hpc.training.fake_tensors import fake_copy, fake_tensor_mode

ATEN = torch.ops.aten
FORMULAS: dict[Any, Callable[..., int]] = flop_registry | {
    ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[ATEN._scaled_dot_product_flash_attention],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        ATEN._scaled_dot_product_flash_attention_backward
    ],
}
HALF = (torch.float16, torch.bfloat16)
RECOMPUTING = ("unpack_hook", "backward")  # functions of torch.utils.checkpoint that repeat a forward pass


class StepFlops:
    """Count the FLOPs of a module's training step, as the module is now: before it is sharded, compiled, recomputed.

    A copy of the module does the step, on tensors without content: its losses, networks, and all its backward passes.
    Neither the module nor the batch, random numbers or other ranks have a part in it.
    """

    def __init__(self, module: L.LightningModule) -> None:
        with fake_tensor_mode() as self.mode:
            self.copy = fake_copy(module)

    def count(self, batch: Any, trainer: L.Trainer | None = None) -> int:
        """Return the floating-point operations of forward and backward for a batch, to be called once.

        Counted are matrix products, convolutions and attention, with two operations per multiply-add, and attention as
        if it were not causal, as PaLM counts (Chowdhery et al., 2022, appendix B). What activation checkpointing
        repeats does not count.

        Args:
            batch: as training_step gets it.
            trainer: of the run.

        Raises:
            Exception: any error of the module; see `dry_run.explain`.
        """
        # The copy has the precision in which the module was built; Lightning has converted the batch to the run's.
        converted = {*HALF, *([torch.float64] if trainer and trainer.precision == "64-true" else [])}

        def change(tensor: Tensor) -> dict[str, Any]:
            return {"dtype": torch.float32} if tensor.dtype in converted else {}

        dry_trainer = dry_run.DryRunTrainer()
        dry_trainer.datamodule = getattr(trainer, "datamodule", None)
        # Other kernels for attention repeat a part of its forward in backward.
        kernels = sdpa_kernel(SDPBackend.MATH)
        with isolate_rng(include_cuda=False), dry_run.without_process_group(), kernels, fake_tensor_mode(self.mode):
            dry_run.attach(self.copy, dry_trainer)
            dry_run.make_optimizers(self.copy)
            batch = fake_copy(batch, change)
            with _FlopCounter() as counter:
                loss = dry_run.training_step(self.copy, batch)
                if loss is not None:
                    self.copy.backward(loss)
        return counter.flops


class _FlopCounter(TorchDispatchMode):
    """Count as torch's FlopCounterMode does, without what activation checkpointing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flops = operation_flops(func, args, kwargs, out=out)
        if flops and not _is_repeated():
            self.flops += flops
        return out


def operation_flops(func: Any, args: Any, kwargs: Any, *, out: Any) -> int:
    """Return the FLOPs of one operation that torch dispatches; 0 if no formula is known. The plan counts with this."""
    formula = FORMULAS.get(operation_packet(func))
    return formula(*args, **(kwargs or {}), out_val=out) if formula else 0


def _is_repeated() -> bool:
    """Return whether torch.utils.checkpoint repeats a forward pass now. (Backward itself records no gradients.)"""
    frame: Any = sys._getframe() if torch.is_grad_enabled() else None
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__ and frame.f_code.co_name in RECOMPUTING:
            return True
        frame = frame.f_back
    return False
