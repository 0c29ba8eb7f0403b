"""How long a step takes: from a network's trace, its setup and the hardware. Pure; imports no torch.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (roofline: Williams et al.,
2009, doi 10.1145/1498765.1498785), communication as traffic.py says.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hpc.jobs.hardware import Machine
from hpc.plan import traffic
from hpc.plan.setup import Setup
from hpc.plan.trace_types import Trace, Work

CLIPPED = 3  # times that clipping gradients reads or writes each: the norm, and what is scaled


@dataclass(frozen=True)
class Step:
    """Seconds of a step, and the FLOPs that each GPU does in it for the network: 3 times those of forward."""

    compute: float
    communication: float  # that computation does not hide
    optimizer: float
    bubble: float  # of a pipeline that fills and empties
    flops: float

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.optimizer + self.bubble


def step(trace: Trace, setup: Setup, machine: Machine) -> Step:
    """Of a network whose parts are spread evenly over the pipeline's stages.

    The bubble is (p - 1) / v micro-batches of a stage (arXiv 2104.04473, section 2.2).
    """
    forward = sum(duration(part.forward, setup, machine) for part in trace.parts)
    backward = sum(duration(part.backward, setup, machine) for part in trace.parts)
    if setup.checkpointing:
        backward += sum(duration(block.again, setup, machine) for block in trace.blocks)
    exposed = (
        traffic.within(trace, setup, machine)
        + traffic.forward(trace, setup, machine).exposed(forward, setup.overlap, machine)
        + traffic.backward(trace, setup, machine).exposed(backward, setup.overlap, machine)
    )
    once = traffic.gradients(trace, setup, machine).exposed(backward, setup.overlap, machine)
    once += traffic.updated(trace, setup, machine)
    stages, times = setup.pipeline, setup.accumulate
    sent = traffic.between(trace, setup, machine)
    return Step(
        compute=times * (forward + backward) / stages,
        communication=times * (exposed / stages + sent) + once / stages,
        optimizer=update(trace, setup, machine) / stages,
        bubble=(stages - 1) / setup.interleaved * (forward + backward + exposed) / stages,
        flops=times * 3 * flops(trace, setup.micro_batch) / stages,
    )


def duration(works: Iterable[Work], setup: Setup, machine: Machine) -> float:
    """Seconds of operations, one after the other.

    torch.compile fuses those without FLOPs. What a GPU has no units for (bf16 on a V100) is computed in fp32.
    """
    gpu, eager = machine.gpu, machine.eager
    peak = gpu.peak(setup.precision, machine.tf32) or gpu.tflops["fp32"] * 1e12
    total = 0.0
    for work in works:
        arithmetic, size = work.flops.at(setup.micro_batch), work.bytes.at(setup.micro_batch)
        share = gpu.matmul_share if work.bytes.fixed else gpu.attention_share  # attention has no weights
        fused = eager.fused if setup.compile and not arithmetic else 1.0
        moved = size / (eager.memory_share * gpu.bandwidth_gbs * 1e9)
        total += work.count * max(arithmetic / (share * peak), fused * moved, fused * eager.launch)
    return total


def update(trace: Trace, setup: Setup, machine: Machine) -> float:
    """Seconds of the optimizer's step: what it reads and writes of its shard, after clipping.

    It reads a parameter, its gradient and what it keeps, and writes all but the gradient.
    """
    numbers = trace.trained / (1 if setup.sharding == "none" else setup.data_parallel)
    width = 2 if setup.precision.endswith("16-true") else 4
    touched = 3 + 2 * (2.0 if trace.states is None else trace.states) + CLIPPED
    return numbers * width * touched / (machine.eager.memory_share * machine.gpu.bandwidth_gbs * 1e9)


def flops(trace: Trace, examples: float) -> float:
    """Of forward, for so many examples on one rank."""
    return sum(work.count * work.flops.at(examples) for part in trace.parts for work in part.forward)
