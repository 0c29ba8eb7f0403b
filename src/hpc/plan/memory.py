"""Memory of a GPU in a step, from the trace of a network and the setup of a run. Pure; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc.plan.setup import BYTES, ParallelLayout
from hpc.plan.trace_types import BatchCost, Part, Trace, highest

# Parameters that ZeRO-3 keeps gathered, to use them again soon (stage3_max_live_parameters of DeepSpeed).
LIVE_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # saved for backward, and in use within a block
    logits: float  # what the head and the loss add to the activations
    buffers: float  # of the network, and of strategies that gather and reduce
    fixed: float  # CUDA's context and communicators

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def predict_memory(trace: Trace, setup: ParallelLayout, fixed_bytes: float = 0.0) -> Memory:
    """Predict the memory of a rank at its peak; with a pipeline, that of the fullest stage.

    States follow Rajbhandari et al., 2020 (ZeRO), section 3, with the sizes of today's DeepSpeed and FSDP2. The peak
    follows the parts of the network through forward and backward, as they were measured.
    """
    trace = trace.with_checkpointing(setup.checkpointing)
    stages = (_stage_memory(trace, setup, stage, fixed_bytes) for stage in range(setup.pipeline))
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(trace: Trace, setup: ParallelLayout, stage: int, fixed_bytes: float) -> Memory:
    parts = _stage_parts(trace.parts, setup, stage)
    num_parameters = sum(part.num_parameters for part in parts)
    num_trained_per_rank = sum(part.num_trained_per_rank for part in parts)
    weights, gradients, optimizer = state_bytes(
        num_parameters, num_trained_per_rank, optimizer_states=trace.optimizer_states, setup=setup
    )
    if setup.offload:  # they lie in the node's memory
        weights = gradients = optimizer = 0.0
    gradient_bytes = gradients / num_trained_per_rank if num_trained_per_rank else 0
    examples = setup.micro_batch * _micro_batches_in_flight(setup, stage)
    peak = _peak(parts, examples, setup, gradient_bytes)
    without_head = [part for part in parts if part.name not in ("after", "loss")]
    logits = max(0.0, peak - _peak(without_head, examples, setup, gradient_bytes))
    buffers = sum(part.buffer_bytes for part in parts) + _strategy_buffers(parts, setup)
    activations = max(0.0, peak - gradients - logits)
    return Memory(weights, gradients, optimizer, activations, logits, buffers, fixed_bytes)


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
        num_parameters: of the rank's tensor-parallel share and pipeline stage.
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


def _peak(parts: Sequence[Part], examples: float, setup: ParallelLayout, gradient_bytes: float) -> float:
    """Return the most bytes of activations and gradients together.

    The gradients of the step before stay until backward begins. They stay until the end with ddp, whose buckets stay,
    and while the gradients of micro-batches are accumulated.

    Args:
        gradient_bytes: per parameter.
    """
    all_gradients = gradient_bytes * sum(part.num_trained_per_rank for part in parts)
    gradients_stay = setup.accumulate > 1 or not setup.single
    begins, alive, peak, casts = [], 0.0, all_gradients, 0.0
    for part in parts:
        begins.append(alive)
        peak = max(peak, all_gradients + alive + casts + highest(part.forward_peak, examples))
        is_recomputed = _is_recomputed(part, setup)
        alive += part.output.at(examples) if is_recomputed else part.saved.at(examples)
        casts += max(0.0, part.saved.fixed) if is_recomputed else 0.0  # autocast's copies of weights stay in forward
    gradients, leftover = all_gradients if gradients_stay else 0.0, BatchCost()
    for part, begin in zip(reversed(parts), reversed(begins), strict=True):
        if _is_recomputed(part, setup):
            output_gradient = part.output.at(examples) + max(0.0, leftover.fixed)
            peak = max(peak, gradients + begin + output_gradient + highest(part.forward_peak, examples))
        alive = begin + part.saved.at(examples) + leftover.at(examples)
        peak = max(peak, gradients + alive + highest(part.backward_peak, examples))
        leftover = part.leftover
        gradients += 0.0 if gradients_stay else gradient_bytes * part.num_trained_per_rank
    return peak


def _is_recomputed(part: Part, setup: ParallelLayout) -> bool:
    """Return whether activation checkpointing repeats the forward of this part in backward."""
    return setup.checkpointing and part.name.startswith("block")


def _strategy_buffers(parts: Sequence[Part], setup: ParallelLayout) -> float:
    """Return the bytes in which a strategy gathers parameters and reduces gradients.

    With FSDP2, the parts outside the blocks stay gathered from forward to the end of backward. Of the blocks two are
    gathered, one of them in a buffer, with gradients and the buffer (in fp32 with mixed precision) that reduces them.
    """
    outside = sum(part.num_parameters for part in parts if not part.name.startswith("block"))
    block = max((part.num_parameters for part in parts if part.name.startswith("block")), default=0)
    size = BYTES[setup.computes_in[0]]
    if setup.sharding == "fsdp" and setup.data_parallel > 1:
        return outside * 2 * size + block * (4 * size + (4 if setup.precision.endswith("mixed") else size))
    if setup.sharding == "zero3":
        gathered = outside + sum(part.num_parameters for part in parts)
        return size * (min(gathered, LIVE_PARAMETERS + block) + setup.bucket)
    return float(size * setup.bucket) if setup.sharding.startswith("zero") else 0.0


def _stage_parts(parts: Sequence[Part], setup: ParallelLayout, stage: int) -> Sequence[Part]:
    """Return the parts of a pipeline's stage: its share of the blocks, and what lies at its end of the network."""
    if setup.pipeline == 1:
        return parts
    indices = [index for index, part in enumerate(parts) if part.name.startswith("block")]
    first, end = (len(indices) * number // setup.pipeline for number in (stage, stage + 1))
    begin = 0 if stage == 0 else indices[first]
    return parts[begin : None if stage == setup.pipeline - 1 else indices[end - 1] + 1]


def _micro_batches_in_flight(setup: ParallelLayout, stage: int) -> float:
    """Return how many micro-batches have activations on a stage at once (arXiv 2104.04473, section 2.2).

    With several pieces per stage, it follows the warm-up of Megatron-LM's interleaved schedule.
    """
    stages, pieces = setup.pipeline, setup.interleaved
    if pieces == 1:
        return min(setup.accumulate, stages - stage)
    warm_up = 2 * (stages - 1 - stage) + (pieces - 1) * stages
    return min(setup.accumulate, (warm_up + 1) / pieces)
