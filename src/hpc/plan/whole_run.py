"""Predictions of a run as a whole: jobs under the time limit, GPU-hours, checkpoints. Pure; imports no torch."""

import math
from dataclasses import dataclass

from hpc.plan.setup import BYTES, ParallelLayout
from hpc.plan.trace_types import Trace

START_SECONDS = 120.0  # of a job before its first step: environment, rendezvous, torch.compile
MAX_WARNING_SECONDS = 120.0  # before the time limit a job begins to end; at most a tenth of the limit (jobs/slurm.py)
# Bytes per second that a node writes: torch.distributed.checkpoint, until the disk confirms that it has them.
WRITE_BANDWIDTH = 1.3e9
# A node fails every 264 days: 419 interruptions of 16,384 GPUs, 2,048 nodes, in 54 days (arXiv 2407.21783, 3.3.4).
NODE_MTBF_SECONDS = 54 * 86400 * 2048 / 419


@dataclass(frozen=True)
class Finish:
    """The way to the last step, without the time in the queue."""

    seconds: float
    requeues: int
    gpu_hours: float


@dataclass(frozen=True)
class CheckpointCost:
    """The checkpoints of a run."""

    bytes: float
    seconds: float  # to write one
    every_seconds: float  # between two of them, so that writing and failures together cost least


def predict_finish(step_seconds: float, num_steps: int, *, num_gpus: int, limit_seconds: float | None) -> Finish | None:
    """Predict the end of a run in jobs of at most `limit_seconds`, one after the other.

    Args:
        num_gpus: that a job gets, idle ones included.

    Returns:
        None if not even one step fits into such a job.
    """
    requeues = 0
    if limit_seconds is not None:
        usable_seconds = limit_seconds - START_SECONDS - min(MAX_WARNING_SECONDS, limit_seconds / 10)
        steps_per_job = math.floor(usable_seconds / step_seconds)
        if steps_per_job < 1:
            return None
        requeues = max(0, math.ceil(num_steps / steps_per_job) - 1)
    seconds = num_steps * step_seconds + START_SECONDS * (requeues + 1)
    return Finish(seconds, requeues, seconds * num_gpus / 3600)


def predict_checkpoint_cost(trace: Trace, setup: ParallelLayout) -> CheckpointCost:
    """Predict size and time of a checkpoint, of which each node writes its share."""
    size = checkpoint_bytes(trace, setup)
    seconds = size / (WRITE_BANDWIDTH * setup.nodes)
    return CheckpointCost(size, seconds, best_interval_seconds(seconds, NODE_MTBF_SECONDS / setup.nodes))


def checkpoint_bytes(trace: Trace, setup: ParallelLayout) -> float:
    """Return the size of a checkpoint. ZeRO saves 16-bit weights beside the fp32 weights that it updates."""
    kind, _, mode = setup.precision.partition("-")
    width = 4 if mode == "mixed" else BYTES[kind]
    optimizer_states = 2.0 if trace.optimizer_states is None else trace.optimizer_states
    copy_width = BYTES[kind] if setup.sharding.startswith("zero") and BYTES[kind] == 2 else 0
    width = 4 if copy_width else width
    trained = sum(
        group.num_parameters_all_ranks * group.num_trained_per_rank / group.num_parameters
        for group in trace.groups
        if group.num_parameters
    )
    buffers = sum(group.buffer_bytes for group in trace.groups)
    return trace.num_parameters * (width + copy_width) + trained * width * optimizer_states + buffers


def best_interval_seconds(write_seconds: float, failure_seconds: float) -> float:
    """Return the time between checkpoints that costs least.

    It is sqrt(2 write failure) (Young, 1974, doi 10.1145/361147.361115), with the further terms of Daly (2006,
    doi 10.1016/j.future.2004.11.016, equation 37).

    Args:
        write_seconds: to write a checkpoint.
        failure_seconds: mean time between two failures.
    """
    if write_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = write_seconds / (2 * failure_seconds)
    young = math.sqrt(2 * write_seconds * failure_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_seconds
