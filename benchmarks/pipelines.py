"""Runs with pipeline stages: train.py runs none, and the plan knows none, but published runs have them."""

from dataclasses import dataclass, replace

from hpc.jobs.hardware import Machine
from hpc.plan.setup import ParallelLayout
from hpc.plan.step_time import predict_step
from hpc.plan.trace_types import Trace


@dataclass(frozen=True)
class Pipeline:
    """The stages over which the blocks of a network are spread evenly (arXiv 2104.04473, section 2.2)."""

    pipeline: int = 1  # stages
    interleaved: int = 1  # pieces of the network per stage

    def step_seconds(self, trace: Trace, layout: ParallelLayout, machine: Machine, *, output_bytes: float) -> float:
        """Return the time of a step: the work of a stage, the bubble, and what stages hand to each other.

        A stage does its share of a run on its own nodes. The bubble is (p - 1) / v of its micro-batches.

        Args:
            layout: of the run on the nodes of one stage.
            output_bytes: that a block hands on, of a micro-batch.
        """
        if self.pipeline == 1:
            return predict_step(trace, layout, machine).seconds
        all_stages = predict_step(trace, layout, machine).seconds
        one, two = (predict_step(trace, replace(layout, accumulate=times), machine).seconds for times in (1, 2))
        bubble = (self.pipeline - 1) / self.interleaved * (two - one)
        hand_on = 2 * self.interleaved * _send_seconds(output_bytes / layout.tensor_parallel, layout, machine)
        return (all_stages + bubble) / self.pipeline + layout.accumulate * hand_on


def _send_seconds(size: float, layout: ParallelLayout, machine: Machine) -> float:
    """Return the time in which each GPU of a node sends so many bytes to the next stage."""
    network = machine.network
    if layout.world_size < layout.devices:
        bandwidth = machine.gpu.link_gbs * 1e9 * network.link_share
        return network.start_seconds + network.link_hop_seconds + size / bandwidth
    assert machine.node_gbs is not None
    bandwidth = machine.node_gbs * 1e9 * network.node_share / layout.devices
    return network.start_seconds + network.node_hop_seconds + size / bandwidth
