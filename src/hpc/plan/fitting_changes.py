"""The smallest changes of a config after which a run fits, as overrides to type. Pure; imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from hpc.plan.prediction import with_global_batch
from hpc.plan.setup import ParallelLayout

MAX_NODES = 1024
# From little sharding to much: the strategy to type, and the fields of the setup that it changes.
STRATEGIES: dict[str, dict[str, Any]] = {
    "deepspeed_zero1": {"sharding": "zero1"},
    "deepspeed_zero2": {"sharding": "zero2"},
    "fsdp": {"sharding": "fsdp"},
    "deepspeed_zero3": {"sharding": "zero3", "compile": False},
}
OFFLOAD = {"sharding": "zero3", "compile": False, "offload": True}
# For a run on one device: the trainer to type and its nodes; SHARDED are the fields that these trainers set.
TRAINERS = {"fsdp": 1, "fsdp_4node": 4}
SHARDED = {"single": False, "sharding": "fsdp", "precision": "bf16-mixed"}
PRECISIONS = {"32-true": "bf16-mixed", "16-mixed": "bf16-true", "bf16-mixed": "bf16-true"}


@dataclass(frozen=True)
class Change:
    """An override to type, and the fields of the setup that it changes."""

    override: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A setup after the changes of some overrides."""

    overrides: tuple[str, ...]
    setup: ParallelLayout


def smallest_fitting(
    candidates: Sequence[Candidate], fits: Callable[[Candidate], bool], *, max_count: int
) -> list[Candidate]:
    """Return the candidates with the fewest overrides that fit, in their order.

    Of candidates that override the same keys, only the first one is returned.
    """
    fitting: dict[frozenset[str], Candidate] = {}
    for candidate in candidates:
        if len(fitting) == max_count or (fitting and len(candidate.overrides) > len(next(iter(fitting)))):
            break
        keys = frozenset(override.partition("=")[0] for override in candidate.overrides)
        if keys not in fitting and fits(candidate):
            fitting[keys] = candidate
    return list(fitting.values())


def list_candidates(
    setup: ParallelLayout,
    *,
    has_blocks: bool,
    batch_key: str | None = "data.global_batch_size",
    max_nodes: int | None = None,
    devices: int | None = None,
) -> Iterator[Candidate]:
    """Yield candidates of up to three changes with the same global batch: few before many, cheap before expensive.

    Args:
        has_blocks: the network names its blocks.
        batch_key: gives the batch size: data.global_batch_size, or data.batch_size, which then changes, too. None: the
            loaders of the data decide, so that the batch of a device cannot change.
        max_nodes: that the cluster allows.
        devices: per node of the cluster.
    """
    changes = _changes(setup, has_blocks=has_blocks, max_nodes=max_nodes or MAX_NODES, devices=devices)
    kinds = [kind for kind in changes if kind]
    for number in (1, 2, 3):
        for combination in combinations(kinds, number):
            for chosen in product(*combination):
                fields = {key: value for change in chosen for key, value in change.fields.items()}
                keys = {change.override.partition("=")[0] for change in chosen}
                changed = with_global_batch(setup, setup.global_batch, **fields) if len(keys) == number else None
                if changed and (batch := _batch_overrides(setup, changed, batch_key)) is not None:
                    yield Candidate((*(change.override for change in chosen), *batch), changed)


def _batch_overrides(setup: ParallelLayout, changed: ParallelLayout, batch_key: str | None) -> tuple[str, ...] | None:
    """Return what else must be typed so that the global batch stays; None if it cannot stay."""
    if changed.micro_batch == setup.micro_batch or batch_key == "data.global_batch_size":
        return ()
    return (f"{batch_key}={changed.micro_batch}",) if batch_key else None


def _changes(setup: ParallelLayout, *, has_blocks: bool, max_nodes: int, devices: int | None) -> list[list[Change]]:
    """Return changes by kind, in the order of their cost: none, time, other hardware, much time, precision."""
    powers = [2**power for power in range(1, 11)]
    accumulate = [setup.accumulate * power for power in powers if setup.micro_batch % power == 0]
    nodes = [setup.nodes * power for power in powers if setup.nodes * power <= max_nodes]
    strategies = [name for name in STRATEGIES if not setup.single and setup.tensor_parallel == 1]
    trainers = [name for name, count in TRAINERS.items() if setup.single and devices and count <= max_nodes]
    checkpointing = [Change("strategy.activation_checkpointing=true", {"checkpointing": True})]
    precision = PRECISIONS.get(setup.precision)
    return [
        [Change(f"strategy={name}", STRATEGIES[name]) for name in strategies[_num_weaker_or_equal_strategies(setup) :]],
        [Change(f"trainer.accumulate_grad_batches={count}", {"accumulate": count}) for count in accumulate],
        checkpointing if has_blocks and not setup.checkpointing else [],
        [Change(f"trainer.num_nodes={count}", {"nodes": count}) for count in nodes if not setup.single],
        [Change(f"trainer={name}", {"nodes": TRAINERS[name], "devices": devices} | SHARDED) for name in trainers],
        [Change("strategy=zero3_offload", OFFLOAD)] if strategies and not setup.offload else [],
        [Change(f"trainer.precision={precision}", {"precision": precision})] if precision else [],
    ]


def _num_weaker_or_equal_strategies(setup: ParallelLayout) -> int:
    """Return how many of STRATEGIES shard no more than this setup does."""
    names = [fields["sharding"] for fields in STRATEGIES.values()]
    return names.index(setup.sharding) + 1 if setup.sharding in names else 0
