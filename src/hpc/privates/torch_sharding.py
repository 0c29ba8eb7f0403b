"""Private attributes of torch's FSDP2 and DTensor that this package uses, and why.

FSDP2 has a record of each parameter that it shards (FSDPParam), in groups that it gathers together (FSDPParamGroup). It
has no public way to notice that a shard or a gathered copy was changed or replaced.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return the part of a DTensor that this rank holds, without a copy and a gradient; others as they are."""
    return getattr(tensor, "_local_tensor", tensor)


def set_local_shard(tensor: Any, value: Tensor) -> None:
    """Let a DTensor hold another part, as assigning to its `data` does not."""
    tensor._local_tensor = value


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """Return the functions by which DTensor computes some operations in a way of their own, to add to them."""
    return DTensor._op_dispatcher._custom_op_handlers


def is_fsdp_hook(hook: Any) -> bool:
    """Return whether a hook of a module's forward is FSDP's own."""
    return isinstance(getattr(hook, "__self__", None), FSDPState)


def begin_forward(module: Any, args: Any, kwargs: Any) -> Any:
    """Gather the parameters of a sharded module, as FSDP does before its forward, without one."""
    return module._get_fsdp_state()._pre_forward(module, args, kwargs)


def end_forward(module: Any, args: Any, output: Any) -> Any:
    """Do what FSDP does after the forward of a sharded module."""
    return module._get_fsdp_state()._post_forward(module, args, output)


def is_in_forward(module: Any) -> bool:
    """Return whether a sharded module or a part around it is in its forward."""
    return module._get_fsdp_state()._state_ctx.iter_forward_root is not None


def parameter_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP gathers for a sharded module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.10 has one
    return [group for group in groups if group is not None]


def is_gathering(group: Any) -> bool:
    """Return whether FSDP has begun to gather a group, ahead of the forward that needs it."""
    return group._all_gather_result is not None


def is_gathered_for_forward(group: Any) -> bool:
    """Return whether a group was gathered for a forward."""
    return group._training_state is TrainingState.FORWARD


def sharding_steps(group: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the functions that put whole parameters in the place of shards, and shards in the place of those."""
    return group._to_unsharded, group._to_sharded


def replace_sharding_steps(group: Any, to_unsharded: Callable[[], None], to_sharded: Callable[[], None]) -> None:
    """Replace the two functions of `sharding_steps`."""
    group._to_unsharded, group._to_sharded = to_unsharded, to_sharded


def let_gathers_wait(group: Any) -> None:
    """Let the device gather a group again only when it has done what was asked of it until now."""
    event = group.device_handle.Event()
    event.record()
    group._wait_all_gather_streams_on_event(event)


def parameter_name(record: Any) -> str:
    """Return the name of a parameter in the sharded module, or in its part if FSDP does not know the former yet."""
    return record._param_fqn or record._module_info.param_name


def registered_parameter(record: Any) -> Any:
    """Return what the module has under the name of a parameter now: a shard, a whole copy, or whatever was assigned."""
    return getattr(record._module_info.module, record._module_info.param_name)


def register_parameter(record: Any, value: nn.Parameter) -> None:
    """Put a parameter into the module, and into all others that share it."""
    record._setattr_on_modules(value)


def shard_data(record: Any) -> Tensor:
    """Return the flat tensor from which FSDP gathers a shard."""
    return record._sharded_param_data


def whole_parameter(record: Any) -> Any:
    """Return the whole copy that was gathered last; None before the first."""
    return getattr(record, "_unsharded_param", None)


def whole_size(record: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter on this rank."""
    return tuple(record._orig_size)


def view_as_whole(record: Any, buffer: Tensor) -> Tensor:
    """Return the view of a gathered buffer that is the whole parameter."""
    return buffer.as_strided(record._orig_size, record._contiguous_orig_stride)
