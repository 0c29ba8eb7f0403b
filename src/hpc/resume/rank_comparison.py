"""What must be the same on all ranks between two steps. They compare it when they agree, and before they save."""

import zlib
from itertools import chain
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc.config.errors import ConfigError, join_names
from hpc.data.loader_agreement import extremes
from hpc.resume import schedules

ROUNDING = 1e-5  # relative to a parameter's largest number: some hundred times the last digit of single precision
PART = 1 << 24
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
    places = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1}
    if group is None or places["num_replicas"] == 1:  # all get the same samples, and average nothing
        return
    if getattr(trainer.strategy, "_model_averager", None):  # it averages weights every few steps
        return
    checksums = _weight_checksums(trainer)
    least, most = extremes(zlib.crc32(repr(checksums).encode()), group)
    if least == most:
        return
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, checksums, group=group)
    names = [name for name in dict.fromkeys(chain(*of_ranks)) if len({other.get(name) for other in of_ranks}) > 1]
    parameters = dict(trainer.lightning_module.named_parameters())
    if all(name in other for name in names for other in of_ranks) and all(
        _distance(parameters[name], group) <= ROUNDING for name in names
    ):
        return  # as of processors that round otherwise, or weights that an optimizer moves and moves back
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
        name: parameter.detach()
        for name, parameter in trainer.lightning_module.named_parameters()
        if _is_comparable(parameter) and name not in apart
    }
    if not held:
        return {}
    device = trainer.strategy.root_device
    sums = torch.stack([_sum_bits(value).to(device) for value in held.values()]).tolist()  # one wait for the device
    return dict(zip(held, sums, strict=True))


def _is_comparable(parameter: nn.Parameter) -> bool:
    """Return whether its bits can be read, and are the same on all ranks: those of DeepSpeed's experts are not."""
    value = parameter.detach()
    is_plain = type(value) is Tensor and value.layout == torch.strided and not value.is_meta and not value.is_quantized
    return is_plain and value.numel() > 0 and getattr(parameter, "allreduce", True)


def _sum_bits(value: Tensor) -> Tensor:
    value = torch.view_as_real(value) if value.is_complex() else value
    bits = value.view(INTEGERS[value.element_size()]).reshape(-1)
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(PART)]).sum()  # a sum converts what it adds


def _distance(parameter: nn.Parameter, group: Any) -> float:
    """Return the largest difference from rank 0's on any rank, relative to rank 0's largest number."""
    value = parameter.detach()
    own = (torch.view_as_real(value) if value.is_complex() else value).double().cpu()
    first = own.clone()
    dist.broadcast(first, 0, group=group)
    distance = (own - first).abs().max() / first.abs().max().clamp(min=torch.finfo(torch.double).tiny)
    dist.all_reduce(distance, dist.ReduceOp.MAX, group=group)
    return float(distance)
