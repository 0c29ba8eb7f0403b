"""Communication between the ranks of a setup, and how much of it computation hides. Pure; imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc.jobs.hardware import Machine
from hpc.plan.collective_times import Group, all_reduce_seconds, gather_seconds
from hpc.plan.setup import BYTES, ParallelLayout
from hpc.plan.trace_types import ParameterGroup, Trace

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
    """Return the time to gather the parameters of each group before it is used."""
    gathers = [_gather_seconds(group, setup, machine) for group in trace.groups]
    return OverlappedTime(sum(gathers), next(filter(None, gathers), 0.0))


def backward_collectives_time(trace: Trace, setup: ParallelLayout, machine: Machine) -> OverlappedTime:
    """Return the time to gather parameters again, and to sum gradients on the rank that keeps them.

    FSDP still has the last block's parameters. ZeRO-3 gathers a recomputed block twice, unless it is small.
    """
    still_gathered = trace.blocks[-1:] if setup.sharding == "fsdp" else ()
    recomputed = trace.blocks if setup.sharding == "zero3" and setup.checkpointing else ()
    gathers = [_gather_seconds(group, setup, machine) for group in trace.groups if group not in still_gathered]
    large = [group for group in recomputed if group.num_parameters > REUSED_PARAMETERS]
    gathers += [_gather_seconds(group, setup, machine) for group in large]
    scatters = [_scatter_seconds(group, setup, machine) for group in trace.groups]
    return OverlappedTime(sum(gathers) + sum(scatters), next(filter(None, scatters), 0.0))


def gradient_sums_time(trace: Trace, setup: ParallelLayout, machine: Machine) -> OverlappedTime:
    """Return the time, once per step, in which DDP and ZeRO-1 sum gradients. The others sum in each backward."""
    size, group = _trained_bytes(trace.groups, setup), data_parallel_group(setup)
    collective = {"none": all_reduce_seconds, "zero1": gather_seconds}.get(setup.sharding)
    if collective is None:
        return OverlappedTime(0.0, 0.0)
    return OverlappedTime(collective(size, group, machine), collective(min(BUCKET_BYTES, size), group, machine))


def parameter_gather_seconds(trace: Trace, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time, once per step, in which ZeRO-1 and 2 gather the parameters that each rank has updated."""
    if setup.sharding not in ("zero1", "zero2"):
        return 0.0
    return gather_seconds(_trained_bytes(trace.groups, setup), data_parallel_group(setup), machine)


def tensor_parallel_sums_seconds(trace: Trace, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time of the sums over tensor-parallel ranks in a micro-batch, which computation waits for.

    The sums are those of arXiv 2104.04473, section 3.2.
    """
    group = Group(setup.tensor_parallel, 1, setup.devices)
    return sum(
        work.count * all_reduce_seconds(work.bytes.at(setup.micro_batch), group, machine) for work in trace.all_reduced
    )


def _gather_seconds(group: ParameterGroup, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time to gather a group: FSDP does it at once (arXiv 2304.11277, section 3.2), ZeRO-3 by tensor."""
    if setup.sharding not in ("fsdp", "zero3"):
        return 0.0
    return _sharded_seconds(group.num_parameters * _wire_bytes(setup), group, setup, machine)


def _scatter_seconds(group: ParameterGroup, setup: ParallelLayout, machine: Machine) -> float:
    """Return the time to sum a group's gradients in each backward, which FSDP, ZeRO-2 and ZeRO-3 do.

    With mixed precision, FSDP sums in fp32 (strategies/parallelize.py).
    """
    if setup.sharding not in ("fsdp", "zero2", "zero3"):
        return 0.0
    width = 4 if setup.sharding == "fsdp" and setup.precision.endswith("mixed") else _wire_bytes(setup)
    return _sharded_seconds(group.num_trained_per_rank * width, group, setup, machine)


def _sharded_seconds(size: float, group: ParameterGroup, setup: ParallelLayout, machine: Machine) -> float:
    if not size:
        return 0.0
    num_pieces = group.num_tensors if setup.sharding == "zero3" else 1
    return num_pieces * gather_seconds(size / num_pieces, data_parallel_group(setup), machine)


def _trained_bytes(groups: Sequence[ParameterGroup], setup: ParallelLayout) -> float:
    return sum(group.num_trained_per_rank for group in groups) * _wire_bytes(setup)


def _wire_bytes(setup: ParallelLayout) -> int:
    """Return the bytes of a parameter or a gradient when it is sent. DDP's stay in fp32 with mixed precision."""
    kind, _, mode = setup.precision.partition("-")
    return 4 if mode == "mixed" and setup.sharding == "none" else BYTES[kind]
