"""What would make a run fit: the smallest changes of its config, as overrides to type. Pure; no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from hpc.plan.plan import on
from hpc.plan.setup import Setup

MOST_NODES = 1024
# From little sharding to much: the strategy to type, and what of the setup it changes.
STRATEGIES: dict[str, dict[str, Any]] = {
    "deepspeed_zero1": {"sharding": "zero1"},
    "deepspeed_zero2": {"sharding": "zero2"},
    "fsdp": {"sharding": "fsdp"},
    "deepspeed_zero3": {"sharding": "zero3", "compile": False},
}
OFFLOAD = {"sharding": "zero3", "compile": False, "offload": True}
# For one device: the trainer to type, its nodes, and what it chooses.
TRAINERS = {"fsdp": 1, "fsdp_4node": 4}
SHARDED = {"single": False, "sharding": "fsdp", "precision": "bf16-mixed"}
PRECISIONS = {"32-true": "bf16-mixed", "16-mixed": "bf16-true", "bf16-mixed": "bf16-true"}


@dataclass(frozen=True)
class Change:
    """An override to type, and the fields of the setup that follow from it."""

    word: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Changed:
    """A setup after some changes; `words` are what to type."""

    words: tuple[str, ...]
    setup: Setup


def smallest(candidates: Sequence[Changed], fits: Callable[[Changed], bool], most: int) -> list[Changed]:
    """The fewest changes that fit, those that cost least first; of those that change the same keys one, the mildest."""
    found: dict[frozenset[str], Changed] = {}
    for candidate in candidates:
        if len(found) == most or (found and len(candidate.words) > len(next(iter(found)))):
            break
        keys = frozenset(word.partition("=")[0] for word in candidate.words)
        if keys not in found and fits(candidate):
            found[keys] = candidate
    return list(found.values())


def candidates(
    setup: Setup, blocks: bool, max_nodes: int | None = None, devices: int | None = None
) -> Iterator[Changed]:
    """Up to three changes of different kinds, few before many and cheap before dear; the global batch stays.

    Args:
        blocks: does the network name any?
        max_nodes: that the cluster gives.
        devices: that its nodes have.
    """
    kinds = [kind for kind in _kinds(setup, blocks, max_nodes or MOST_NODES, devices) if kind]
    for number in (1, 2, 3):
        for chosen in combinations(kinds, number):
            for changes in product(*chosen):
                fields = {key: value for change in changes for key, value in change.fields.items()}
                keys = {change.word.partition("=")[0] for change in changes}
                if len(keys) == number and (changed := on(setup, setup.global_batch, **fields)):
                    yield Changed(tuple(change.word for change in changes), changed)


def _kinds(setup: Setup, blocks: bool, max_nodes: int, devices: int | None) -> list[list[Change]]:
    """By kind, in the order of what they cost: nothing, time, other hardware, much time, digits."""
    powers = [2**power for power in range(1, 11)]
    smaller = [setup.accumulate * power for power in powers if setup.micro_batch % power == 0]
    nodes = [setup.nodes * power for power in powers if setup.nodes * power <= max_nodes]
    sharded = [name for name in STRATEGIES if not setup.single and setup.tensor_parallel == 1]
    trainers = [name for name, count in TRAINERS.items() if setup.single and devices and count <= max_nodes]
    again = [Change("strategy.activation_checkpointing=true", {"checkpointing": True})]
    lower = PRECISIONS.get(setup.precision)
    return [
        [Change(f"strategy={name}", STRATEGIES[name]) for name in sharded[_strictness(setup) :]],
        [Change(f"trainer.accumulate_grad_batches={times}", {"accumulate": times}) for times in smaller],
        again if blocks and not setup.checkpointing else [],
        [Change(f"trainer.num_nodes={number}", {"nodes": number}) for number in nodes if not setup.single],
        [Change(f"trainer={name}", {"nodes": TRAINERS[name], "devices": devices} | SHARDED) for name in trainers],
        [Change("strategy=zero3_offload", OFFLOAD)] if sharded and not setup.offload else [],
        [Change(f"trainer.precision={lower}", {"precision": lower})] if lower else [],
    ]


def _strictness(setup: Setup) -> int:
    """How many of STRATEGIES shard no more than this setup does."""
    names = [fields["sharding"] for fields in STRATEGIES.values()]
    return names.index(setup.sharding) + 1 if setup.sharding in names else 0
