"""The parameters of a module by groups: those of each block, and all others."""

from torch import Tensor, nn
from torch.nn import Parameter

from hpc.plan.meter import local_bytes, storage_key
from hpc.plan.trace_types import ParameterGroup
from hpc.privates.torch import local_shard
from hpc.strategies.blocks import Blocks

OUTSIDE = "outside the blocks"


def list_groups(module: nn.Module, blocks: Blocks | None) -> tuple[ParameterGroup, ...]:
    """Return the groups of a module. A parameter that several blocks share belongs to the first one."""
    names = [f"block {number}" for number in range(len(blocks.modules) if blocks else 0)]
    tensors: dict[str, list[Tensor]] = {name: [] for name in (OUTSIDE, *names)}
    seen: set[int] = set()
    for name, part in (*zip(names, blocks.modules if blocks else (), strict=True), (OUTSIDE, module)):
        for tensor in (*part.parameters(), *part.buffers()):
            if (key := storage_key(tensor)) not in seen:
                seen.add(key)
                tensors[name].append(tensor)
    return tuple(_group(name, states) for name, states in tensors.items())


def _group(name: str, states: list[Tensor]) -> ParameterGroup:
    parameters = [state for state in states if isinstance(state, Parameter)]
    return ParameterGroup(
        name=name,
        num_parameters=sum(local_shard(parameter).numel() for parameter in parameters),
        num_trained_per_rank=sum(local_shard(parameter).numel() for parameter in parameters if parameter.requires_grad),
        num_parameters_all_ranks=sum(parameter.numel() for parameter in parameters),
        num_tensors=len(parameters),
        buffer_bytes=sum(local_bytes(state) for state in states if not isinstance(state, Parameter)),
    )
