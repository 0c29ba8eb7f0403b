"""The prediction of a run: memory per GPU, time of a step, and how both change with the nodes. Pure; imports no torch.

memory.py has the formulas for memory, step_time.py those for the time of a step.
"""

from dataclasses import dataclass, replace

from hpc.config.errors import ConfigError
from hpc.jobs.hardware import Machine
from hpc.plan.memory import Memory, offloaded_bytes, predict_memory
from hpc.plan.setup import ParallelLayout
from hpc.plan.step_time import StepTime, predict_step
from hpc.plan.trace_types import Trace

SPARE_SHARE = 0.05  # of a GPU's memory, which the allocator may lose to fragmentation
NUM_NODES = [2**power for power in range(11)]


@dataclass(frozen=True)
class ScalingRate:
    """The rate at some number of nodes."""

    seconds: float  # of a step
    rate: float  # examples or tokens per second
    efficiency: float  # rate per GPU, relative to that of the fewest nodes of the table
    fits: bool


@dataclass(frozen=True)
class PredictedScalingRow:
    """The run on other nodes, with the same global batch (strong scaling) and the same micro-batch (weak scaling)."""

    nodes: int
    gpus: int
    strong: ScalingRate | None  # None: the batch is not divisible, or the network between nodes is unknown
    weak: ScalingRate | None


@dataclass(frozen=True)
class Prediction:
    """The prediction of a run; None: unknown."""

    trace: Trace
    setup: ParallelLayout
    memory: Memory
    capacity: float | None  # bytes of a GPU
    step: StepTime | None
    rate: float | None  # examples or tokens per second
    mfu: float | None
    scaling: tuple[PredictedScalingRow, ...]
    node_memory: float | None = None  # bytes of a node

    @property
    def read_bytes_per_second_per_node(self) -> float | None:
        """Bytes per second that a node has to read from packed files: one per number of an image, two per token.

        While data arrive this fast, computation hides loading (benchmarks/loading.py).
        """
        if self.rate is None:
            return None
        examples = self.rate / self.trace.tokens_per_example / self.setup.nodes
        return examples * self.trace.numbers_per_example * (2 if self.trace.unit == "tokens" else 1)

    @property
    def margin(self) -> float | None:
        """Bytes that remain free, or that are missing if negative."""
        return None if self.capacity is None else memory_margin(self.capacity, self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if it is unknown, as it is where activations are not counted in what fits."""
        if self.margin is None or self.margin < 0:
            return None if self.margin is None else False
        fits_in_node = _fits_in_node(self.trace, self.setup, self.node_memory)
        return None if self.trace.by_parameters and fits_in_node is not False else fits_in_node


def memory_margin(capacity: float, memory: Memory) -> float:
    """Return the bytes of a GPU that remain free, or that are missing if negative."""
    return capacity * (1 - SPARE_SHARE) - memory.total


def _fits_in_node(trace: Trace, setup: ParallelLayout, node_memory: float | None) -> bool | None:
    """Return whether what is offloaded fits into the main memory of a node; None if that is unknown."""
    offloaded = offloaded_bytes(trace, setup)
    if not offloaded:
        return True
    return None if node_memory is None else offloaded <= node_memory * (1 - SPARE_SHARE)


def predict(trace: Trace, setup: ParallelLayout, machine: Machine | None) -> Prediction:
    """Predict a run on a machine; without a machine, only its memory.

    Raises:
        ConfigError: the batch size is unknown.
    """
    setup = with_loader_batch(setup, trace)
    if machine is None:
        return Prediction(trace, setup, predict_memory(trace, setup), None, None, None, None, ())
    memory, capacity = _memory_and_capacity(trace, setup, machine)
    without_time = Prediction(trace, setup, memory, capacity, None, None, None, (), _node_memory(machine))
    if trace.by_parameters:
        return without_time
    scaling = predict_scaling(trace, setup, machine)
    if setup.nodes > 1 and machine.node_gbs is None:
        return replace(without_time, scaling=scaling)
    step = predict_step(trace, setup, machine)
    peak = machine.gpu.peak_flops(setup.precision, tf32=machine.tf32)
    mfu = step.flops / step.seconds / peak if peak else None
    return replace(without_time, step=step, rate=_rate(trace, setup, step), mfu=mfu, scaling=scaling)


def with_loader_batch(setup: ParallelLayout, trace: Trace) -> ParallelLayout:
    """Return the setup with the batch size of the data's loader, where that is not the one of the config.

    Raises:
        ConfigError: the loader does not say it either.
    """
    if trace.loader_divides_by_ranks and (size := setup.micro_batch or trace.loader_batch_size):
        return replace(setup, micro_batch=max(1, size // setup.world_size))
    if setup.micro_batch or trace.by_parameters:
        return setup
    if trace.loader_batch_size is None:
        rule = "must be given for a plan, because the loader of the data does not say how many samples a batch has"
        raise ConfigError("data.batch_size", None, rule, "data.batch_size=<number>")
    return replace(setup, micro_batch=trace.loader_batch_size)


def with_global_batch(setup: ParallelLayout, global_batch: int, **changes: object) -> ParallelLayout | None:
    """Return the setup with changed fields and this global batch; None if the batch is not divisible by the ranks."""
    changed = replace(setup, **changes)  # type: ignore[arg-type]
    micro_batch, rest = divmod(global_batch, changed.data_parallel * changed.accumulate)
    return None if rest or not micro_batch else replace(changed, micro_batch=micro_batch)


def predict_scaling(trace: Trace, setup: ParallelLayout, machine: Machine) -> tuple[PredictedScalingRow, ...]:
    """Predict the rate for 1 to 1024 nodes, in powers of two, and for the nodes of the setup."""
    several_nodes = machine.node_gbs is not None and not setup.single
    counts = sorted({setup.nodes, *NUM_NODES} if several_nodes else {1})
    strong = {nodes: with_global_batch(setup, setup.global_batch, nodes=nodes) for nodes in counts}
    weak = {nodes: with_global_batch(setup, replace(setup, nodes=nodes).global_batch, nodes=nodes) for nodes in counts}
    strong_rates, weak_rates = (_scaling_rates(trace, setups, machine) for setups in (strong, weak))
    return tuple(
        PredictedScalingRow(nodes, nodes * setup.devices, strong_rates[nodes], weak_rates[nodes]) for nodes in counts
    )


def fits_in_memory(trace: Trace, setup: ParallelLayout, machine: Machine) -> bool:
    """Return whether a run fits on the machine, as far as that is known."""
    memory, capacity = _memory_and_capacity(trace, setup, machine)
    return memory_margin(capacity, memory) >= 0 and bool(_fits_in_node(trace, setup, _node_memory(machine)))


def _node_memory(machine: Machine) -> float | None:
    """Return the bytes of a node's main memory; None if they are unknown."""
    return None if machine.node_memory_gb is None else machine.node_memory_gb * 1e9


def _memory_and_capacity(trace: Trace, setup: ParallelLayout, machine: Machine) -> tuple[Memory, float]:
    """Return the memory that a run needs on a GPU, and the bytes that a GPU has."""
    return predict_memory(trace, setup, machine.gpu.fixed_gb * 1e9), machine.gpu.memory_gb * 1e9


def _scaling_rates(
    trace: Trace, setups: dict[int, ParallelLayout | None], machine: Machine
) -> dict[int, ScalingRate | None]:
    rates: dict[int, ScalingRate | None] = {}
    first_rate_per_gpu = None
    for nodes, setup in setups.items():
        if setup is None:
            rates[nodes] = None
            continue
        step = predict_step(trace, setup, machine)
        rate = _rate(trace, setup, step)
        rate_per_gpu = rate / setup.world_size
        first_rate_per_gpu = first_rate_per_gpu or rate_per_gpu
        fits = fits_in_memory(trace, setup, machine)
        rates[nodes] = ScalingRate(step.seconds, rate, rate_per_gpu / first_rate_per_gpu, fits)
    return rates


def _rate(trace: Trace, setup: ParallelLayout, step: StepTime) -> float:
    return setup.global_batch * trace.tokens_per_example / step.seconds
