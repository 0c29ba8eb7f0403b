"""How long a run takes as a whole: jobs under the time limit, GPU-hours, checkpoints. Pure; imports no torch."""

import math
from dataclasses import dataclass

from hpc.plan.setup import BYTES, Setup
from hpc.plan.trace_types import Trace

START = 120.0  # seconds of a job before its first step: the environment, ranks that meet, what torch.compile makes
WARNING = 120.0  # seconds before the limit that a job begins to end, but at most a tenth of it (slurm.py)
WRITTEN = 1.3e9  # bytes per second and node: torch.distributed.checkpoint, with the disk's word that it has them
# A node fails every 264 days: 419 interruptions of 16,384 GPUs, 2,048 nodes, in 54 days (arXiv 2407.21783, 3.3.4).
NODE_FAILS = 54 * 86400 * 2048 / 419


@dataclass(frozen=True)
class Finish:
    """Until the last step, without the time in the queue."""

    seconds: float
    requeues: int
    gpu_hours: float


@dataclass(frozen=True)
class Checkpoint:
    bytes: float
    seconds: float  # to write it
    every_seconds: float  # that lose least by saving and by failures


def finish(step_seconds: float, steps: int, setup: Setup, limit: float | None) -> Finish | None:
    """Of steps in jobs of at most `limit` seconds, one after the other. None: not even one step fits into such."""
    requeues = 0
    if limit is not None:
        of_a_job = math.floor((limit - START - min(WARNING, limit / 10)) / step_seconds)
        if of_a_job < 1:
            return None
        requeues = max(0, math.ceil(steps / of_a_job) - 1)
    seconds = steps * step_seconds + START * (requeues + 1)
    return Finish(seconds, requeues, seconds * setup.world_size / 3600)


def checkpoint(trace: Trace, setup: Setup) -> Checkpoint:
    """What a run keeps of parameters and optimizer, all ranks together; each node writes its share."""
    size = kept(trace, setup)
    seconds = size / (WRITTEN * setup.nodes)
    return Checkpoint(size, seconds, interval(seconds, NODE_FAILS / setup.nodes))


def kept(trace: Trace, setup: Setup) -> float:
    """Bytes of a checkpoint. ZeRO keeps 16-bit weights beside the fp32 ones that it updates."""
    kind, _, how = setup.precision.partition("-")
    width = 4 if how == "mixed" else BYTES[kind]
    states = 2.0 if trace.states is None else trace.states
    copies = BYTES[kind] if setup.sharding.startswith("zero") and BYTES[kind] == 2 else 0
    width = 4 if copies else width
    trained = sum(part.whole * part.trained / part.parameters for part in trace.parts if part.parameters)
    buffers = sum(part.buffer_bytes for part in trace.parts)
    return trace.whole * (width + copies) + trained * width * states + buffers


def interval(write: float, fails: float) -> float:
    """Seconds between checkpoints that take `write` when a failure comes every `fails` seconds on average.

    sqrt(2 write fails) (Young, 1974, doi 10.1145/361147.361115), with the further terms of Daly (2006,
    doi 10.1016/j.future.2004.11.016, equation 37).
    """
    if write >= 2 * fails:
        return fails
    share = write / (2 * fails)
    return math.sqrt(2 * write * fails) * (1 + math.sqrt(share) / 3 + share / 9) - write
