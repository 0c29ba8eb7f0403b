"""Memory of one GPU in a step, from the trace of a network and the setup of a run. Pure; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc.plan.setup import BYTES, Setup
from hpc.plan.trace_types import Linear, Part, Trace, highest

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
    stages = (_memory(trace, setup, stage, fixed) for stage in range(setup.pipeline))
    return max(stages, key=lambda stage: stage.total)


def _memory(trace: Trace, setup: Setup, stage: int, fixed: float) -> Memory:
    parts = _of_stage(trace.parts, setup, stage)
    numbers, trained = (sum(getattr(part, kind) for part in parts) for kind in ("parameters", "trained"))
    weights, gradients, optimizer = states(numbers, trained, trace.states, setup)
    if setup.offload:  # they lie in the node's memory
        weights = gradients = optimizer = 0.0
    share = gradients / trained if trained else 0
    at_once = setup.micro_batch * _in_flight(setup, stage)
    peak = _peak(parts, at_once, setup, share)
    without_head = [part for part in parts if part.name not in ("after", "loss")]
    logits = max(0.0, peak - _peak(without_head, at_once, setup, share))
    buffers = sum(part.buffer_bytes for part in parts) + _gathered(parts, setup)
    return Memory(weights, gradients, optimizer, max(0.0, peak - gradients - logits), logits, buffers, fixed)


def states(numbers: float, trained: float, kept: float | None, setup: Setup) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer of a rank.

    Args:
        numbers: parameters, of which tensor parallelism and stages have had their share.
        trained: those of them that are not frozen.
        kept: by the optimizer per parameter; None counts as AdamW's two.
    """
    kind, _, how = setup.precision.partition("-")
    per = 2.0 if kept is None else kept
    ranks = setup.data_parallel
    if not setup.sharding.startswith("zero"):
        each = (4 if how == "mixed" else BYTES[kind]) / (ranks if setup.sharding == "fsdp" else 1)
        return numbers * each, trained * each, per * trained * each
    weights = numbers * BYTES[kind] / (ranks if setup.sharding == "zero3" else 1)
    gradients = trained * BYTES[kind] / (1 if setup.sharding == "zero1" else ranks)
    return weights, gradients, 4 * trained * (1 + per) / ranks


def _peak(parts: Sequence[Part], examples: float, setup: Setup, gradient: float) -> float:
    """Activations and gradients together, at most.

    Gradients of the step before are there until backward begins; with ddp, whose buckets stay, and while micro-batches
    add up, until the end.
    """
    whole = gradient * sum(part.trained for part in parts)
    stays = setup.accumulate > 1 or not setup.single
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
        there += 0.0 if stays else gradient * part.trained
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


def _of_stage(parts: Sequence[Part], setup: Setup, stage: int) -> Sequence[Part]:
    """The parts of a pipeline's stage: its share of the blocks, and what stands at its end of the network."""
    if setup.pipeline == 1:
        return parts
    places = [place for place, part in enumerate(parts) if part.name.startswith("block")]
    first, last = (len(places) * one // setup.pipeline for one in (stage, stage + 1))
    begin = 0 if stage == 0 else places[first]
    return parts[begin : None if stage == setup.pipeline - 1 else places[last - 1] + 1]


def _in_flight(setup: Setup, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once (arXiv 2104.04473, section 2.2).

    Of pieces, as many forwards come before the first backward as Megatron-LM's interleaved schedule warms up with.
    """
    stages, pieces = setup.pipeline, setup.interleaved
    if pieces == 1:
        return min(setup.accumulate, stages - stage)
    warm_up = 2 * (stages - 1 - stage) + (pieces - 1) * stages
    return min(setup.accumulate, (warm_up + 1) / pieces)
