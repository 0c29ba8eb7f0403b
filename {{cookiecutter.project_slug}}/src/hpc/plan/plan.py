"""What a run will need: memory per GPU, seconds of a step, how both change with nodes. Pure; no torch.

Formulas are where their names lead: memory.py, steptime.py, campaign.py.
"""

from dataclasses import dataclass, replace

from hpc.jobs.hardware import Machine
from hpc.plan import step_time
from hpc.plan.memory import Memory, memory
from hpc.plan.setup import Setup
from hpc.plan.trace_types import Trace

SPARE = 0.05  # of a GPU's memory that is not promised: the allocator leaves gaps between what it was asked for
NODES = [2**power for power in range(11)]


@dataclass(frozen=True)
class Rate:
    """A step at some number of nodes."""

    seconds: float
    rate: float  # examples or tokens per second
    efficiency: float  # rate per GPU over that of the fewest nodes of the table
    fits: bool


@dataclass(frozen=True)
class Row:
    """The same run on other nodes: with its global batch (strong scaling), or with its micro-batch (weak scaling)."""

    nodes: int
    gpus: int
    strong: Rate | None  # None: the batch does not divide, or the network between nodes is not known
    weak: Rate | None


@dataclass(frozen=True)
class Plan:
    """What plan.py tells."""

    trace: Trace
    setup: Setup
    memory: Memory
    room: float | None  # bytes of a GPU; None: not known
    step: step_time.Step | None
    rate: float | None  # examples or tokens per second
    mfu: float | None
    scaling: tuple[Row, ...]

    @property
    def read_per_node(self) -> float | None:
        """Bytes per second that a node has to read: of packed files, one for a number of an image, two for a token.

        While data come that fast, loading hides behind computing (benchmarks/loading.py).
        """
        if self.rate is None:
            return None
        examples = self.rate / self.trace.tokens / self.setup.nodes
        return examples * self.trace.inputs * (2 if self.trace.examples_are == "tokens" else 1)

    @property
    def margin(self) -> float | None:
        """Bytes that are left, or lack if below 0; None: nobody knows."""
        return None if self.room is None else left(self.room, self.memory)

    @property
    def fits(self) -> bool | None:
        return None if self.margin is None else self.margin >= 0


def left(room: float, memory: Memory) -> float:
    return room * (1 - SPARE) - memory.total


def plan(trace: Trace, setup: Setup, machine: Machine | None) -> Plan:
    """Of a run on this machine; without one, only memory, as far as the network decides it."""
    if machine is None:
        return Plan(trace, setup, memory(trace, setup), None, None, None, None, ())
    held, room = _held(trace, setup, machine)
    if setup.nodes > 1 and machine.node_gbs is None:
        return Plan(trace, setup, held, room, None, None, None, scaling(trace, setup, machine))
    step = step_time.step(trace, setup, machine)
    peak = machine.gpu.peak(setup.precision, machine.tf32)
    mfu = step.flops / step.seconds / peak if peak else None
    return Plan(trace, setup, held, room, step, _rate(trace, setup, step), mfu, scaling(trace, setup, machine))


def on(setup: Setup, global_batch: int, **changed: object) -> Setup | None:
    """The setup with other fields and the same global batch; None where that does not divide."""
    other = replace(setup, **changed)  # type: ignore[arg-type]
    if other.data_parallel < 1 or other.world_size % (other.tensor_parallel * other.pipeline):
        return None
    micro, rest = divmod(global_batch, other.data_parallel * other.accumulate)
    return None if rest or not micro else replace(other, micro_batch=micro)


def scaling(trace: Trace, setup: Setup, machine: Machine) -> tuple[Row, ...]:
    """From 1 to 1024 nodes, by powers of two, and those that are asked for."""
    more = machine.node_gbs is not None and not setup.single
    counts = sorted({setup.nodes, *NODES} if more else {1})
    strong = {nodes: on(setup, setup.global_batch, nodes=nodes) for nodes in counts}
    weak = {nodes: on(setup, _weak(setup, nodes), nodes=nodes) for nodes in counts}
    kinds = [_rates(trace, setups, machine) for setups in (strong, weak)]
    return tuple(Row(nodes, nodes * setup.devices, kinds[0][nodes], kinds[1][nodes]) for nodes in counts)


def _held(trace: Trace, setup: Setup, machine: Machine) -> tuple[Memory, float]:
    """What a GPU holds, and what it can."""
    return memory(trace, setup, machine.gpu.fixed_gb * 1e9), machine.gpu.memory_gb * 1e9


def fits(trace: Trace, setup: Setup, machine: Machine) -> bool:
    held, room = _held(trace, setup, machine)
    return left(room, held) >= 0


def _weak(setup: Setup, nodes: int) -> int:
    return replace(setup, nodes=nodes).global_batch


def _rates(trace: Trace, setups: dict[int, Setup | None], machine: Machine) -> dict[int, Rate | None]:
    found: dict[int, Rate | None] = {}
    first = None
    for nodes, setup in setups.items():
        if setup is None:
            found[nodes] = None
            continue
        step = step_time.step(trace, setup, machine)
        rate = _rate(trace, setup, step)
        first = first or rate / setup.world_size
        found[nodes] = Rate(step.seconds, rate, rate / setup.world_size / first, fits(trace, setup, machine))
    return found


def _rate(trace: Trace, setup: Setup, step: step_time.Step) -> float:
    return setup.global_batch * trace.tokens / step.seconds
