"""Memory of one GPU in a step, from the trace of a network and the setup of a run. Pure; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from .setup import BYTES, Setup
from .traced import Linear, Part, Trace, highest

LIVE = 1_000_000_000  # numbers that ZeRO-3 leaves gathered, to be used again soon (stage3_max_live_parameters)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU when most is in use."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # kept for backward, and what a block works with
    logits: float  # what the head and the loss add to that
    buffers: float  # of the network, and what strategies gather and reduce in
    fixed: float  # context and communicators

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def memory(trace: Trace, setup: Setup, fixed: float = 0.0) -> Memory:
    """What a rank of this setup holds at its peak.

    States follow Rajbhandari et al., 2020 (ZeRO), section 3, with the sizes that today's DeepSpeed and FSDP2 have; the
    peak follows the parts of the network through forward and backward, as they were measured.
    """
    parts = _of_stage(trace.parts, setup)
    numbers = sum(part.parameters for part in parts)
    weights, gradients, optimizer = states(numbers, trace.states, setup)
    share = gradients / numbers if numbers else 0
    at_once = setup.micro_batch * _in_flight(setup)
    peak = _peak(parts, at_once, setup, share)
    without_head = [part for part in parts if part.name not in ("after", "loss")]
    logits = max(0.0, peak - _peak(without_head, at_once, setup, share))
    buffers = sum(part.buffer_bytes for part in parts) + _gathered(parts, setup)
    return Memory(weights, gradients, optimizer, max(0.0, peak - gradients - logits), logits, buffers, fixed)


def states(numbers: float, kept: float | None, setup: Setup) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer of a rank.

    Args:
        numbers: parameters, of which tensor parallelism and stages have had their share.
        kept: by the optimizer per parameter; None counts as AdamW's two.
    """
    kind, _, how = setup.precision.partition("-")
    per = 2.0 if kept is None else kept
    ranks = setup.data_parallel
    if not setup.sharding.startswith("zero"):
        size = numbers * (4 if how == "mixed" else BYTES[kind]) / (ranks if setup.sharding == "fsdp" else 1)
        return size, size, per * size
    copy, master = numbers * BYTES[kind], 4 * numbers * (1 + per) / ranks
    sharded = copy / ranks
    weights = sharded if setup.sharding == "zero3" else copy
    gradients = copy if setup.sharding == "zero1" else sharded
    return (0.0, 0.0, 0.0) if setup.offload else (weights, gradients, master)


def _peak(parts: Sequence[Part], examples: float, setup: Setup, gradient: float) -> float:
    """Activations and gradients together, at most.

    Gradients of the step before are there until backward begins; with ddp, whose buckets stay, and while micro-batches
    add up, until the end.
    """
    whole = gradient * sum(part.parameters for part in parts)
    stays = setup.accumulate > 1 or (setup.sharding != "none" or setup.data_parallel > 1)
    begins, alive, top, cast = [], 0.0, whole, 0.0
    for part in parts:
        begins.append(alive)
        top = max(top, whole + alive + cast + highest(part.forward_peak, examples))
        again = _again(part, setup)
        alive += part.output.at(examples) if again else part.kept.at(examples)
        cast += max(0.0, part.kept.fixed) if again else 0.0  # autocast's copies of weights live as long as forward
    there, left = whole if stays else 0.0, Linear()
    for part, begin in zip(reversed(parts), reversed(begins), strict=True):
        if _again(part, setup):
            gradient_of_output = part.output.at(examples) + max(0.0, left.fixed)
            top = max(top, there + begin + gradient_of_output + highest(part.forward_peak, examples))
        alive = begin + part.kept.at(examples) + left.at(examples)
        top = max(top, there + alive + highest(part.backward_peak, examples))
        left = part.left
        there += 0.0 if stays else gradient * part.parameters
    return top


def _again(part: Part, setup: Setup) -> bool:
    """Is it computed again in backward?"""
    return setup.checkpointing and part.name.startswith("block")


def _gathered(parts: Sequence[Part], setup: Setup) -> float:
    """What sharded parameters and gradients become for a while.

    FSDP2: what stands beside the blocks stays whole from forward to the end of backward; of the blocks two, one of them
    just gathered into a buffer, with gradients and, in fp32, the buffer that these are reduced in.
    """
    beside = sum(part.parameters for part in parts if not part.name.startswith("block"))
    block = max((part.parameters for part in parts if part.name.startswith("block")), default=0)
    size = BYTES[setup.computes_in[0]]
    if setup.sharding == "fsdp" and setup.data_parallel > 1:
        return beside * 2 * size + block * (4 * size + (4 if setup.precision.endswith("mixed") else size))
    if setup.sharding == "zero3":
        whole = beside + sum(part.parameters for part in parts)
        return size * (min(whole, LIVE + block) + setup.bucket)
    return float(size * setup.bucket) if setup.sharding.startswith("zero") else 0.0


def _of_stage(parts: Sequence[Part], setup: Setup) -> Sequence[Part]:
    """The parts of the first pipeline stage, or of the whole network; a stage has its share of the blocks."""
    if setup.pipeline == 1:
        return parts
    blocks = [part for part in parts if part.name.startswith("block")]
    return [parts[0], *blocks[: -(-len(blocks) // setup.pipeline)]]


def _in_flight(setup: Setup) -> float:
    """Micro-batches whose activations the first stage holds at once (arXiv 2104.04473, section 2.2)."""
    stages = setup.pipeline
    if stages == 1:
        return 1.0
    extra = (stages - 1) / stages / setup.interleaved if setup.interleaved > 1 else 0.0
    return min(setup.accumulate, stages) * (1 + extra)
