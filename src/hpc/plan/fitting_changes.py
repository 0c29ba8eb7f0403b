"""A change of a config after which a run fits, as overrides to type, found on a ladder of changes. Imports no torch."""

from collections.abc import Iterator, Sequence

from hpc.config.batch_size import GLOBAL, PER_DEVICE
from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError
from hpc.config.parse import parse
from hpc.config.sections import Config
from hpc.jobs.hardware import Machine
from hpc.plan import trace_cache
from hpc.plan.prediction import fits_in_memory, with_loader_batch
from hpc.plan.setup import ParallelLayout, setup_from_config
from hpc.plan.trace_types import Trace

MAX_NODES = 1024
POWERS = [2**power for power in range(1, 11)]
STRATEGIES = {"none": "fsdp", "zero1": "deepspeed_zero3", "zero2": "deepspeed_zero3"}  # that shard more
TRAINERS = {"fsdp": 1, "fsdp_4node": 4}  # for a run on one device: the trainer to type, and its nodes
PRECISIONS = {"32-true": "bf16-mixed", "16-mixed": "bf16-true", "bf16-mixed": "bf16-true"}
NO_CHANGE_FITS = "a smaller network or global batch: no strategy, number of nodes or precision makes this one fit"
NO_CHANGE_WITH_LOADER_FITS = (
    "a smaller network, or a smaller batch of your loader: with its present batch no strategy or precision makes this "
    "run fit (more nodes or accumulated batches would enlarge the global batch)"
)


def find_fitting_change(
    cfg: Config, words: Sequence[str], trace: Trace, setup: ParallelLayout, machine: Machine
) -> tuple[str | None, str]:
    """Return overrides with which, on top of `words`, a run fits that does not.

    The changes of the ladder are made one after the other until the run fits; those that it does not need are left out.

    Args:
        trace, setup: of the run as it is.

    Returns:
        The overrides, None if there are none, and the sentence to print in that case.
    """
    traces = {_arithmetic(setup): trace}
    global_batch = setup_from_config(cfg).global_batch

    def changed_setup(changes: dict[str, str]) -> ParallelLayout | None:
        changed = _compose_setup([*words, *_overrides(changes)])
        return changed if changed and changed.global_batch == global_batch else None

    def fits(changed: ParallelLayout | None) -> bool:
        if changed is None:
            return False
        if (arithmetic := _arithmetic(changed)) not in traces:
            traces[arithmetic] = trace_cache.load_trace(cfg, changed)
        trace = traces[arithmetic]
        return fits_in_memory(trace, with_loader_batch(changed, trace), machine)

    key = next((f"data.{key}" for key in (GLOBAL, PER_DEVICE) if cfg.data.get(key) is not None), None)
    nodes = MAX_NODES if cfg.cluster.scheduler else 1  # without one, nothing starts ranks on other nodes
    gpus = cfg.cluster.gpus_per_node
    changes: dict[str, str] = {}
    try:
        for change in ladder(setup, has_blocks=bool(trace.blocks), batch_key=key, max_nodes=nodes, devices=gpus):
            if changed := changed_setup(changes | change):
                changes |= change
            if fits(changed):
                break
        else:
            return None, NO_CHANGE_FITS if key else NO_CHANGE_WITH_LOADER_FITS
        for override in reversed(list(changes)):  # the costly ones first
            fewer = {key: value for key, value in changes.items() if key != override}
            changes = fewer if fits(changed_setup(fewer)) else changes
    except trace_cache.TracingError as error:
        return None, f"a smaller network or batch, because the changed step cannot be planned here: {error}"
    return " ".join(_overrides(changes)), ""


def ladder(
    setup: ParallelLayout,
    *,
    has_blocks: bool,
    batch_key: str | None,
    max_nodes: int = MAX_NODES,
    devices: int | None = None,
) -> Iterator[dict[str, str]]:
    """Yield changes by their cost: none, time, other hardware, much time, precision. Each is made beside those before.

    All keep the global batch: while devices are added, fewer batches are accumulated.

    Args:
        has_blocks: the network has blocks whose activations can be dropped.
        batch_key: gives the batch size: data.global_batch_size, or data.batch_size, which then changes, too. None: the
            loaders of the data decide, so that the batch of a device cannot change.
        max_nodes: that a job may have.
        devices: per node of the cluster.
    """
    can_shard = not setup.single and setup.tensor_parallel == 1
    if can_shard and setup.sharding in STRATEGIES:
        yield {"strategy": STRATEGIES[setup.sharding]}
    halves = [power for power in POWERS if setup.micro_batch % power == 0] if batch_key else []
    for power in halves:
        size_key = f"data.{PER_DEVICE}"
        batch = {size_key: str(setup.micro_batch // power)} if batch_key == size_key else {}
        yield {"trainer.accumulate_grad_batches": str(setup.accumulate * power)} | batch
    if has_blocks and not setup.checkpointing:
        yield {"strategy.activation_checkpointing": "true"}
    num_batches = setup.accumulate * max(halves, default=1)
    for power, change in _more_devices(setup, max_nodes=max_nodes, devices=devices):
        if batch_key and num_batches % power == 0:
            yield change | {"trainer.accumulate_grad_batches": str(num_batches // power)}
    if can_shard and not setup.offload:
        yield {"strategy": "zero3_offload"}
    if precision := PRECISIONS.get(setup.precision):
        yield {"trainer.precision": precision}


def _more_devices(
    setup: ParallelLayout, *, max_nodes: int, devices: int | None
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield by what number the devices are multiplied, and the change that does so."""
    if not setup.single:
        yield from (
            (power, {"trainer.num_nodes": str(setup.nodes * power)})
            for power in POWERS
            if setup.nodes * power <= max_nodes
        )
    elif devices:
        yield from ((devices * nodes, {"trainer": name}) for name, nodes in TRAINERS.items() if nodes <= max_nodes)


def _overrides(changes: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def _arithmetic(setup: ParallelLayout) -> tuple[object, ...]:
    """Return what determines a trace."""
    return (*setup.computes_in, setup.tensor_parallel, setup.checkpointing)


def _compose_setup(words: Sequence[str]) -> ParallelLayout | None:
    """Return the setup of a command line; None if its config breaks a rule."""
    try:
        cfg = parse(compose_overrides(words))
    except ConfigError:
        return None
    return setup_from_config(cfg)
