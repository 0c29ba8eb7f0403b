"""The time of a step, from a network's trace, its setup and the hardware. Pure; imports no torch.

An operation takes as long as its arithmetic or its memory traffic, whichever is longer (roofline: Williams et al.,
2009, doi 10.1145/1498765.1498785). traffic.py has the times of communication.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hpc.jobs.hardware import Machine
from hpc.plan import traffic
from hpc.plan.setup import ParallelLayout
from hpc.plan.trace_types import Trace, Work

CLIPPING_ACCESSES = 3  # how often clipping reads or writes each gradient: for the norm, and to scale it


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part."""

    compute: float
    communication: float  # that computation does not hide
    optimizer: float
    flops: float  # of the network per GPU: 3 times those of forward

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.optimizer


def predict_step(trace: Trace, setup: ParallelLayout, machine: Machine) -> StepTime:
    """Predict the time of a step of a network."""
    forward = operations_seconds(trace.forward, setup, machine)
    backward = operations_seconds(trace.backward, setup, machine)
    overlap = setup.overlap
    exposed = (
        traffic.tensor_parallel_sums_seconds(trace, setup, machine)
        + traffic.forward_gathers_time(trace, setup, machine).exposed(forward, overlap=overlap, machine=machine)
        + traffic.backward_collectives_time(trace, setup, machine).exposed(backward, overlap=overlap, machine=machine)
    )
    once = traffic.gradient_sums_time(trace, setup, machine).exposed(backward, overlap=overlap, machine=machine)
    once += traffic.parameter_gather_seconds(trace, setup, machine)
    return StepTime(
        compute=setup.accumulate * (forward + backward),
        communication=setup.accumulate * exposed + once,
        optimizer=optimizer_seconds(trace, setup, machine),
        flops=setup.accumulate * 3 * forward_flops(trace, setup.micro_batch),
    )


def operations_seconds(works: Iterable[Work], setup: ParallelLayout, machine: Machine) -> float:
    """Return the time of operations, one after the other.

    torch.compile fuses those without FLOPs. A precision for which a GPU has no units (bf16 on a V100) runs in fp32.
    """
    gpu, operations = machine.gpu, machine.operations
    peak = gpu.peak_flops(setup.precision, tf32=machine.tf32) or gpu.tflops["fp32"] * 1e12
    total = 0.0
    for work in works:
        flops, size = work.flops.at(setup.micro_batch), work.bytes.at(setup.micro_batch)
        share = gpu.matmul_share if work.bytes.fixed else gpu.attention_share  # attention has no weights
        fused = operations.fused_share if setup.compile and not flops else 1.0
        memory_seconds = size / (operations.memory_share * gpu.bandwidth_gbs * 1e9)
        total += work.count * max(flops / (share * peak), fused * memory_seconds, fused * operations.launch_seconds)
    return total


def optimizer_seconds(trace: Trace, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time of the optimizer's step on a rank's shard, after clipping.

    It reads a parameter, its gradient and its states, and writes all of them but the gradient. ZeRO updates copies in
    fp32.
    """
    num_parameters = trace.num_trained_per_rank / (1 if setup.sharding == "none" else setup.data_parallel)
    width = 2 if setup.precision.endswith("16-true") and not setup.sharding.startswith("zero") else 4
    states = 2.0 if trace.optimizer_states is None else trace.optimizer_states
    accesses = 3 + 2 * states + CLIPPING_ACCESSES
    return num_parameters * width * accesses / (machine.operations.memory_share * machine.gpu.bandwidth_gbs * 1e9)


def forward_flops(trace: Trace, examples: float) -> float:
    """Return the FLOPs of forward for so many examples on one rank."""
    return sum(work.count * work.flops.at(examples) for work in trace.forward)
