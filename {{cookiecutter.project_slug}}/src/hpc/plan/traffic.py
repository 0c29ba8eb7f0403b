"""What the ranks of a setup have to send each other, and how much of that computation hides. Pure; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc.jobs.hardware import Machine
from hpc.plan.rings import Group, gather, reduce, send
from hpc.plan.setup import BYTES, Setup
from hpc.plan.trace_types import Part, Trace

BUCKET = 25e6  # bytes; the last of DDP's buckets is summed when backward is over (arXiv 2006.15704, section 3.2)
REUSED = 1e9  # parameters that ZeRO-3 keeps when they are needed again so soon (stage3_max_reuse_distance of DeepSpeed)


@dataclass(frozen=True)
class Beside:
    """Seconds of communication beside computation, and of the first or last of it, which has none to run beside."""

    total: float
    end: float

    def exposed(self, compute: float, overlap: bool, machine: Machine) -> float:
        """Both share the GPU's units and its memory: one beside the other, some of the time is only moved."""
        if not overlap:
            return self.total
        return max(self.end, self.total - compute, (1 - machine.network.hidden) * self.total)


def shards(setup: Setup) -> Group:
    """The data-parallel ranks; those that share a layer are neighbours."""
    return Group(setup.data_parallel, setup.tensor_parallel, setup.devices)


def forward(trace: Trace, setup: Setup, machine: Machine) -> Beside:
    """Parameters of each part, gathered before it runs."""
    gathers = [_gather(part, setup, machine) for part in trace.parts]
    return Beside(sum(gathers), next(filter(None, gathers), 0.0))


def backward(trace: Trace, setup: Setup, machine: Machine) -> Beside:
    """Parameters once more, and gradients summed to the rank that keeps them.

    FSDP still has the last block's. ZeRO-3 gathers a block that is computed again twice, unless it is small.
    """
    kept = trace.blocks[-1:] if setup.sharding == "fsdp" else ()
    again = trace.blocks if setup.sharding == "zero3" and setup.checkpointing else ()
    gathers = [_gather(part, setup, machine) for part in trace.parts if part not in kept]
    gathers += [_gather(part, setup, machine) for part in again if part.parameters > REUSED]
    scatters = [_scatter(part, setup, machine) for part in trace.parts]
    return Beside(sum(gathers) + sum(scatters), next(filter(None, scatters), 0.0))


def gradients(trace: Trace, setup: Setup, machine: Machine) -> Beside:
    """Once a step: what DDP sums and ZeRO-1 sums to the rank that keeps it. The others do so in each backward."""
    size, group = _bytes(trace.parts, setup), shards(setup)
    collective = {"none": reduce, "zero1": gather}.get(setup.sharding)
    if collective is None:
        return Beside(0.0, 0.0)
    return Beside(collective(size, group, machine), collective(min(BUCKET, size), group, machine))


def updated(trace: Trace, setup: Setup, machine: Machine) -> float:
    """Once a step: parameters from the ranks that have updated them, to all (ZeRO-1 and 2)."""
    if setup.sharding not in ("zero1", "zero2"):
        return 0.0
    return gather(_bytes(trace.parts, setup), shards(setup), machine)


def within(trace: Trace, setup: Setup, machine: Machine) -> float:
    """Sums over tensor-parallel ranks of one micro-batch, which computation waits for (arXiv 2104.04473, section 3.2).

    A block that is computed again sums again what its forward has summed: half.
    """
    group = Group(setup.tensor_parallel, 1, setup.devices)
    total = 0.0
    for part in trace.parts:
        again = 1.5 if setup.checkpointing and part in trace.blocks else 1.0
        sums = (work.count * reduce(work.bytes.at(setup.micro_batch), group, machine) for work in part.reduced)
        total += again * sum(sums)
    return total


def between(trace: Trace, setup: Setup, machine: Machine) -> float:
    """A micro-batch handed from stage to stage, forth and back, by each stage as often as it has pieces.

    Each tensor-parallel rank sends its share (arXiv 2104.04473, sections 3.2 and 4.1).
    """
    if setup.pipeline == 1:
        return 0.0
    size = trace.blocks[0].output.at(setup.micro_batch) / setup.tensor_parallel
    across = setup.tensor_parallel * setup.data_parallel >= setup.devices
    return 2 * setup.interleaved * send(size, across, setup.devices, machine)


def _gather(part: Part, setup: Setup, machine: Machine) -> float:
    """FSDP gathers a part in one go (arXiv 2304.11277, section 3.2), ZeRO-3 tensor by tensor."""
    if setup.sharding not in ("fsdp", "zero3"):
        return 0.0
    return _pieces(part.parameters * _width(setup), part, setup, machine)


def _scatter(part: Part, setup: Setup, machine: Machine) -> float:
    """In each micro-batch's backward: FSDP, ZeRO-2 and ZeRO-3. FSDP's mixed precision sums in fp32 (parallel.py)."""
    if setup.sharding not in ("fsdp", "zero2", "zero3"):
        return 0.0
    width = 4 if setup.sharding == "fsdp" and setup.precision.endswith("mixed") else _width(setup)
    return _pieces(part.trained * width, part, setup, machine)


def _pieces(size: float, part: Part, setup: Setup, machine: Machine) -> float:
    if not size:
        return 0.0
    pieces = part.tensors if setup.sharding == "zero3" else 1
    return pieces * gather(size / pieces, shards(setup), machine)


def _bytes(parts: Sequence[Part], setup: Setup) -> float:
    return sum(part.trained for part in parts) * _width(setup)


def _width(setup: Setup) -> int:
    """Bytes of a parameter or a gradient on the wire. DDP's stay in fp32 where arithmetic is mixed."""
    kind, _, how = setup.precision.partition("-")
    return 4 if how == "mixed" and setup.sharding == "none" else BYTES[kind]
