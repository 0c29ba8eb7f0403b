"""Histograms of weights and gradients in TensorBoard."""

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc.training.loggers import tensorboard_loggers


class Histograms(L.Callback):
    """Weights and gradients of every parameter, each `every_n_steps` optimizer steps; None for never."""

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps, self.enabled = every_n_steps or 1, bool(every_n_steps)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if trainer.global_step % self.every_n_steps:
            return
        # Gathering a sharded tensor is a collective: every rank takes part, rank 0 writes.
        for name, parameter in pl_module.named_parameters():
            for kind, tensor in _gather(parameter).items():
                if tensor is not None:
                    _write(trainer, f"{kind}/{name}", tensor)


def _gather(parameter: Parameter) -> dict[str, Tensor | None]:
    """Return the whole weights and gradients of one parameter, however the strategy shards them."""
    if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):  # ZeRO-3, ZeRO-1 and -2
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        return {"weights": safe_get_full_fp32_param(parameter), "gradients": safe_get_full_grad(parameter)}
    tensors = {"weights": parameter.detach(), "gradients": parameter.grad}
    return {kind: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for kind, tensor in tensors.items()}


@rank_zero_only
def _write(trainer: L.Trainer, tag: str, tensor: Tensor) -> None:
    for logger in tensorboard_loggers(trainer):
        logger.experiment.add_histogram(tag, tensor.float(), trainer.global_step)
