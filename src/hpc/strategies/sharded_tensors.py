"""Let DTensors, as FSDP2 and tensor parallelism make them of parameters, compute and store what torch leaves out.

Elementwise operations, sums and means are torch's.
"""

import pickle
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from hpc.config.errors import ConfigError
from hpc.privates.torch import FakeTensor
from hpc.privates.torch_sharding import dtensor_handlers, local_shard, set_local_shard

DATA: Any = torch.Tensor.data
aten = torch.ops.aten
RANDOM_OPERATIONS = (
    aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.bernoulli.default, aten.rand_like.default,
    aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
)  # fmt: skip
# Errors of torch where code for whole parameters meets shards.
UNSHARDED_CODE = re.compile(
    r"mixed torch\.Tensor and DTensor|is not supported for tensor subclasses|FSDP does not support deepcopy|"
    r"unevenly sharded tensor|format string passed to DTensor"
)
EXPLANATION = (
    "With strategy=fsdp each rank holds a shard of each parameter outside of a step. Read a whole one with "
    "parameter.full_tensor(), on all ranks; change one by another shard or in a step; copy a module in __init__; run "
    "the network by self(...), or its parts within a step. strategy=ddp needs none of this."
)


def complete_dtensor(meet_to_read: Callable[[], None]) -> None:
    """Complete the class, for this process; called again, it changes only `meet_to_read`.

    Args:
        meet_to_read: is called before a number is read, which all ranks must do together.
    """

    def read_scalar(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the number that all ranks' shards give together; torch returns this rank's part of a norm."""
        tensor = args[0]
        is_replicated = all(placement.is_replicate() for placement in tensor.placements)
        is_of_all = tensor.device_mesh.size() == dist.get_world_size()
        if is_of_all and not is_replicated and not _is_read_by_optimizer():
            meet_to_read()
        return tensor.full_tensor().item()

    DTensor.data = property(_get_data, _set_data)  # type: ignore[assignment]
    DTensor.__reduce_ex__ = _reject_pickling  # type: ignore[method-assign]
    handlers = dtensor_handlers()
    handlers[aten._local_scalar_dense.default] = read_scalar
    handlers.update(dict.fromkeys(RANDOM_OPERATIONS, _draw_whole))


def explain(error: BaseException) -> None:
    """Add to an error of torch about shards what to write instead."""
    if UNSHARDED_CODE.search(str(error)):
        error.add_note(EXPLANATION)


def _get_data(tensor: Any) -> Tensor:
    if "is_data_used" in tensor.__dict__:  # it is gathered: tensor parallelism makes DTensors of whole copies, too
        tensor.is_data_used = True
    return DATA.__get__(tensor)


def _set_data(tensor: Any, value: Tensor) -> None:
    """Assign to `data`, which torch ignores for a DTensor, a tensor that is whole or sharded in any way."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        rule = f"Once it is sharded, a parameter must keep its shape {tuple(tensor.shape)} and {tensor.dtype}; "
        rule += f"{tuple(value.shape)} and {value.dtype} were assigned to its `data`"
        raise ConfigError("model", None, rule, "the final shape and type in __init__ or configure_model")
    set_local_shard(tensor, local_shard(shard_like(tensor, value.detach())))
    _get_data(tensor)


def shard_like(shard: DTensor, value: Tensor) -> DTensor:
    """Return a tensor, whole or sharded in any way, cut as `shard` is."""
    if isinstance(value, DTensor):
        return value if value.placements == shard.placements else value.redistribute(placements=shard.placements)
    return distribute_tensor(value.detach(), shard.device_mesh, shard.placements, src_data_rank=None)


def _is_read_by_optimizer() -> bool:
    """Return whether an optimizer of torch reads a number: all ranks call it, and it may read one of each parameter."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or "/torch/distributed/" in frame.f_code.co_filename):
        frame = frame.f_back
    return "/torch/optim/" in frame.f_code.co_filename


def _draw_whole(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Draw random numbers for a whole tensor, on all ranks those of the first; shards would repeat each other's."""
    tensor, *rest = args
    whole = (
        tensor.full_tensor()
        if operation is aten.bernoulli.default
        else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    )
    drawn = distribute_tensor(operation(whole, *rest, **kwargs), tensor.device_mesh, tensor.placements)
    if not operation.__name__.split(".")[0].endswith("_"):
        return drawn
    local_shard(tensor).copy_(local_shard(drawn))
    return tensor


def _reject_pickling(tensor: Any, protocol: Any) -> Any:
    if isinstance(local_shard(tensor), FakeTensor):  # the compiler's own cache
        return Tensor.__reduce_ex__(tensor, protocol)
    raise pickle.PicklingError(
        "Each rank holds only a shard of this tensor. To save the whole module, call trainer.save_checkpoint(path) on "
        "all ranks; tools/export.py makes one file of it. To save one tensor, save tensor.full_tensor()"
    )


def is_sharded(parameter: Tensor) -> bool:
    """Return whether ranks of data parallelism hold shards of it, which tensor parallelism alone does not do."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names != ("tensor_parallel",)
