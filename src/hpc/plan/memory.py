"""Memory of a GPU in a step, from the trace of a network and the setup of a run. Pure; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc.plan.setup import BYTES, ParallelLayout
from hpc.plan.trace_types import MemoryLevel, ParameterGroup, Trace

# Parameters that ZeRO-3 keeps gathered, to use them again soon (stage3_max_live_parameters of DeepSpeed).
LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # saved for backward, and in use in forward or backward
    logits: float  # what the head and the loss add to the activations
    buffers: float  # of the network, and of strategies that gather and reduce
    fixed: float  # CUDA's context and communicators

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def predict_memory(trace: Trace, setup: ParallelLayout, fixed_bytes: float = 0.0) -> Memory:
    """Predict the memory of a rank at its peak.

    States follow Rajbhandari et al., 2020 (ZeRO), section 3, with the sizes of today's DeepSpeed and FSDP2.
    """
    counts = trace.num_parameters_per_rank, trace.num_trained_per_rank
    weights, gradients, optimizer = state_bytes(*counts, optimizer_states=trace.optimizer_states, setup=setup)
    if setup.offload:  # they lie in the node's memory
        weights = gradients = optimizer = 0.0
    peak = _peak(trace.levels, setup, gradients)
    logits = peak - _peak([level for level in trace.levels if not level.is_head], setup, gradients)
    buffers = sum(group.buffer_bytes for group in trace.groups) + _strategy_buffers(trace.groups, setup)
    return Memory(weights, gradients, optimizer, peak - gradients - logits, logits, buffers, fixed_bytes)


def offloaded_bytes(trace: Trace, setup: ParallelLayout) -> float:
    """Return the bytes of weights, gradients and optimizer that lie in the main memory of a node; 0 on GPUs."""
    counts = trace.num_parameters_per_rank, trace.num_trained_per_rank
    states = state_bytes(*counts, optimizer_states=trace.optimizer_states, setup=setup)
    return sum(states) * setup.devices if setup.offload else 0.0


def state_bytes(
    num_parameters: float, num_trained_per_rank: float, *, optimizer_states: float | None, setup: ParallelLayout
) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer of a rank.

    Args:
        num_parameters: of the rank's tensor-parallel share.
        num_trained_per_rank: those of them that are not frozen.
        optimizer_states: numbers that the optimizer keeps per parameter; None counts as AdamW's two.
    """
    kind, _, mode = setup.precision.partition("-")
    states = 2.0 if optimizer_states is None else optimizer_states
    num_ranks = setup.data_parallel
    if not setup.sharding.startswith("zero"):
        width = (4 if mode == "mixed" else BYTES[kind]) / (num_ranks if setup.sharding == "fsdp" else 1)
        return num_parameters * width, num_trained_per_rank * width, states * num_trained_per_rank * width
    weights = num_parameters * BYTES[kind] / (num_ranks if setup.sharding == "zero3" else 1)
    gradients = num_trained_per_rank * BYTES[kind] / (1 if setup.sharding == "zero1" else num_ranks)
    return weights, gradients, 4 * num_trained_per_rank * (1 + states) / num_ranks


def _peak(levels: Sequence[MemoryLevel], setup: ParallelLayout, gradients: float) -> float:
    """Return the most bytes of activations and gradients together.

    All gradients stay until the end of the step with ddp, whose buckets stay, and while those of micro-batches are
    accumulated.

    Args:
        gradients: bytes of all gradients.
    """
    gradients_stay = setup.accumulate > 1 or not setup.single
    sizes = (
        level.activations.at(setup.micro_batch) + gradients * (1.0 if gradients_stay else level.gradients)
        for level in levels
    )
    return max(gradients, *sizes) if levels else gradients


def _strategy_buffers(groups: Sequence[ParameterGroup], setup: ParallelLayout) -> float:
    """Return the bytes in which a strategy gathers parameters and reduces gradients.

    With FSDP2, parameters outside the blocks stay gathered from forward to the end of backward. Of the blocks two are
    gathered, one of them in a buffer, with gradients and the buffer (in fp32 with mixed precision) that reduces them.
    """
    outside = sum(group.num_parameters for group in groups if not group.is_block)
    block = max((group.num_parameters for group in groups if group.is_block), default=0)
    size = BYTES[setup.computes_in[0]]
    if setup.sharding == "fsdp" and setup.data_parallel > 1:
        return outside * 2 * size + block * (4 * size + (4 if setup.precision.endswith("mixed") else size))
    if setup.sharding == "zero3":
        gathered = outside + sum(group.num_parameters for group in groups)
        return size * (min(gathered, LIVE_PARAMETERS + block) + setup.bucket)
    return float(size * setup.bucket) if setup.sharding.startswith("zero") else 0.0
