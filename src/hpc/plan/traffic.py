"""Communication between the ranks of a setup, and how much of it computation hides. Pure; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc.jobs.hardware import Machine
from hpc.plan.collective_times import Group, all_reduce_seconds, gather_seconds, send_seconds
from hpc.plan.setup import BYTES, ParallelLayout
from hpc.plan.trace_types import Part, Trace

# Bytes. The last of DDP's buckets is summed when backward is over (arXiv 2006.15704, section 3.2).
BUCKET_BYTES = 25e6
# Parameters that ZeRO-3 keeps if they are needed again soon (stage3_max_reuse_distance of DeepSpeed).
REUSED_PARAMETERS = 1e9


@dataclass(frozen=True)
class OverlappedTime:
    """Seconds of communication that may overlap with computation.

    `end`: the seconds of the first or last collective, which nothing can hide.
    """

    total: float
    end: float

    def exposed(self, compute_seconds: float, *, overlap: bool, machine: Machine) -> float:
        """Return the seconds that computation does not hide.

        Both share the GPU's units and its memory, so that a part of the communication always costs time.
        """
        if not overlap:
            return self.total
        return max(self.end, self.total - compute_seconds, (1 - machine.network.overlap_share) * self.total)


def data_parallel_group(setup: ParallelLayout) -> Group:
    """Return the data-parallel ranks; those that share a layer are neighbours."""
    return Group(setup.data_parallel, setup.tensor_parallel, setup.devices)


def forward_gathers_time(trace: Trace, setup: ParallelLayout, machine: Machine) -> OverlappedTime:
    """Return the time to gather the parameters of each part before it runs."""
    gathers = [_gather_seconds(part, setup, machine) for part in trace.parts]
    return OverlappedTime(sum(gathers), next(filter(None, gathers), 0.0))


def backward_collectives_time(trace: Trace, setup: ParallelLayout, machine: Machine) -> OverlappedTime:
    """Return the time to gather parameters again, and to sum gradients on the rank that keeps them.

    FSDP still has the last block's parameters. ZeRO-3 gathers a recomputed block twice, unless it is small.
    """
    still_gathered = trace.blocks[-1:] if setup.sharding == "fsdp" else ()
    recomputed = trace.blocks if setup.sharding == "zero3" and setup.checkpointing else ()
    gathers = [_gather_seconds(part, setup, machine) for part in trace.parts if part not in still_gathered]
    gathers += [_gather_seconds(part, setup, machine) for part in recomputed if part.num_parameters > REUSED_PARAMETERS]
    scatters = [_scatter_seconds(part, setup, machine) for part in trace.parts]
    return OverlappedTime(sum(gathers) + sum(scatters), next(filter(None, scatters), 0.0))


def gradient_sums_time(trace: Trace, setup: ParallelLayout, machine: Machine) -> OverlappedTime:
    """Return the time, once per step, in which DDP and ZeRO-1 sum gradients. The others sum in each backward."""
    size, group = _trained_bytes(trace.parts, setup), data_parallel_group(setup)
    collective = {"none": all_reduce_seconds, "zero1": gather_seconds}.get(setup.sharding)
    if collective is None:
        return OverlappedTime(0.0, 0.0)
    return OverlappedTime(collective(size, group, machine), collective(min(BUCKET_BYTES, size), group, machine))


def parameter_gather_seconds(trace: Trace, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time, once per step, in which ZeRO-1 and 2 gather the parameters that each rank has updated."""
    if setup.sharding not in ("zero1", "zero2"):
        return 0.0
    return gather_seconds(_trained_bytes(trace.parts, setup), data_parallel_group(setup), machine)


def tensor_parallel_sums_seconds(trace: Trace, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time of the sums over tensor-parallel ranks in a micro-batch, which computation waits for.

    The sums are those of arXiv 2104.04473, section 3.2. A recomputed block repeats those of its forward: half of them.
    """
    group = Group(setup.tensor_parallel, 1, setup.devices)
    total = 0.0
    for part in trace.parts:
        repeats = 1.5 if setup.checkpointing and part in trace.blocks else 1.0
        sums = (
            work.count * all_reduce_seconds(work.bytes.at(setup.micro_batch), group, machine)
            for work in part.all_reduced
        )
        total += repeats * sum(sums)
    return total


def stage_transfers_seconds(trace: Trace, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time to hand a micro-batch from stage to stage and back, once for each piece of a stage.

    Each tensor-parallel rank sends its share (arXiv 2104.04473, sections 3.2 and 4.1).
    """
    if setup.pipeline == 1:
        return 0.0
    size = trace.blocks[0].output.at(setup.micro_batch) / setup.tensor_parallel
    to_other_node = setup.tensor_parallel * setup.data_parallel >= setup.devices
    once = send_seconds(size, to_other_node=to_other_node, devices=setup.devices, machine=machine)
    return 2 * setup.interleaved * once


def _gather_seconds(part: Part, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time to gather a part: FSDP does it at once (arXiv 2304.11277, section 3.2), ZeRO-3 by tensor."""
    if setup.sharding not in ("fsdp", "zero3"):
        return 0.0
    return _sharded_seconds(part.num_parameters * _wire_bytes(setup), part, setup, machine)


def _scatter_seconds(part: Part, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time to sum a part's gradients in each backward, which FSDP, ZeRO-2 and ZeRO-3 do.

    With mixed precision, FSDP sums in fp32 (training/parallel.py).
    """
    if setup.sharding not in ("fsdp", "zero2", "zero3"):
        return 0.0
    width = 4 if setup.sharding == "fsdp" and setup.precision.endswith("mixed") else _wire_bytes(setup)
    return _sharded_seconds(part.num_trained_per_rank * width, part, setup, machine)


def _sharded_seconds(size: float, part: Part, setup: ParallelLayout, machine: Machine) -> float:
    if not size:
        return 0.0
    num_pieces = part.num_tensors if setup.sharding == "zero3" else 1
    return num_pieces * gather_seconds(size / num_pieces, data_parallel_group(setup), machine)


def _trained_bytes(parts: Sequence[Part], setup: ParallelLayout) -> float:
    return sum(part.num_trained_per_rank for part in parts) * _wire_bytes(setup)


def _wire_bytes(setup: ParallelLayout) -> int:
    """Return the bytes of a parameter or a gradient when it is sent. DDP's stay in fp32 with mixed precision."""
    kind, _, mode = setup.precision.partition("-")
    return 4 if mode == "mixed" and setup.sharding == "none" else BYTES[kind]
