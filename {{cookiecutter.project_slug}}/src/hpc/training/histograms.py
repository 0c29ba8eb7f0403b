"""Histograms of weights and gradients in TensorBoard."""

from typing import TYPE_CHECKING

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

if TYPE_CHECKING:
    pass
from hpc.training.record import _tensorboards


class Histograms(L.Callback):
    """Weights and gradients of every parameter, each `every_n_steps` optimizer steps; None for never."""

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps, self.enabled = every_n_steps or 1, bool(every_n_steps)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if trainer.global_step % self.every_n_steps:
            return
        # Gathering a sharded tensor is a collective: every rank takes part, rank 0 writes.
        for name, parameter in pl_module.named_parameters():
            for kind, tensor in _gathered(parameter).items():
                if tensor is not None:
                    _write(trainer, f"{kind}/{name}", tensor)


def _gathered(parameter: Parameter) -> dict[str, Tensor | None]:
    """Whole weights and gradients of one parameter, however the strategy keeps them."""
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):  # ZeRO-3, ZeRO-1 and -2
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        return {"weights": safe_get_full_fp32_param(parameter), "gradients": safe_get_full_grad(parameter)}
    both = {"weights": parameter.detach(), "gradients": parameter.grad}
    return {kind: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for kind, tensor in both.items()}


@rank_zero_only
def _write(trainer: L.Trainer, tag: str, tensor: Tensor) -> None:
    for logger in _tensorboards(trainer):
        logger.experiment.add_histogram(tag, tensor.float(), trainer.global_step)
