"""What must be the same on all ranks between two steps. They compare it when they agree, and before they save."""

import zlib
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc.config.errors import ConfigError
from hpc.data.loader_agreement import extremes
from hpc.resume import schedules
from hpc.training.shown_names import join_names

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


def checksum(trainer: L.Trainer, *, is_last: bool) -> int:
    """Return a checksum of the learning rates, and of the order in which FSDP has gathered and reduced.

    Args:
        is_last: no step follows, for which learning rates would count.
    """
    rates = 0 if is_last else schedules.learning_rate_checksum(trainer.optimizers)
    return zlib.crc32(f"{rates} {_order_checksum(trainer)}".encode())


def raise_difference(trainer: L.Trainer, group: Any) -> None:
    """Raise `ConfigError`, on all ranks, as their checksums differ."""
    least, most = extremes(_order_checksum(trainer), group)
    if least == most:
        schedules.raise_learning_rate_mismatch(trainer)
    rule = "With strategy=fsdp all ranks must use the same parts of the module in the same order, as they gather its "
    rule += f"parameters together. By step {trainer.global_step} they have used different ones, and trained with wrong "
    rule += "weights since"
    fix = "all parts on every rank, with 0 * output.sum() of one that is not used added to the loss, or strategy=ddp"
    raise ConfigError("model", None, rule, fix)


def reject_different_weights(trainer: L.Trainer, group: Any) -> None:
    """Compare the weights that all ranks hold whole. All ranks must call this.

    Args:
        group: of all ranks, on the host; None: there is one rank.

    Raises:
        ConfigError: on all ranks, with the names of those that differ.
    """
    if group is None or getattr(trainer.strategy, "_model_averager", None):  # it averages weights every few steps
        return
    checksums = _weight_checksums(trainer)
    least, most = extremes(zlib.crc32(repr(checksums).encode()), group)
    if least == most:
        return
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, checksums, group=group)
    names = [name for name in checksums if any(other.get(name) != checksums[name] for other in of_ranks)]
    rule = "All ranks must have the same weights after a step; these differ. Each rank has changed them by its own "
    rule += "samples: gradients are averaged only where Lightning runs backward"
    fix = (
        "self.manual_backward(loss) in place of loss.backward() or torch.autograd.grad; self.all_gather(value).mean(0) "
    )
    fix += "of a value that weights are set from; no optimizer step in a hook of a gradient"
    raise ConfigError("model", join_names(names) or None, rule, fix)


def _order_checksum(trainer: L.Trainer) -> int:
    return getattr(getattr(trainer.strategy, "gathers", None), "checksum", 0)


def _weight_checksums(trainer: L.Trainer) -> dict[str, int]:
    """Return a checksum of the bits of each parameter that this rank holds whole, and that all are to hold alike."""
    apart = getattr(trainer.strategy.model, "parameters_to_ignore", ())  # by DDP, as their owner wants
    held = {
        name: parameter
        for name, parameter in trainer.lightning_module.named_parameters()
        if not isinstance(parameter, DTensor) and name not in apart and parameter.numel()
    }
    if not held:
        return {}
    sums = torch.stack([_sum_bits(parameter) for parameter in held.values()]).tolist()  # one wait for the device
    return dict(zip(held, sums, strict=True))


def _sum_bits(parameter: nn.Parameter) -> Tensor:
    value = parameter.detach()
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.view(INTEGERS[value.element_size()]).sum(dtype=torch.int64)
