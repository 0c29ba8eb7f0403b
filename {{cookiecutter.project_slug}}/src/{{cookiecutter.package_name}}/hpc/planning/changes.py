"""What would make a run fit: the smallest changes of its config, as overrides to type. Pure; no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from .plan import on
from .setup import Setup

MOST_NODES = 1024
# From little sharding to much: the strategy to type, and what of the setup it changes.
STRATEGIES: dict[str, dict[str, Any]] = {
    "deepspeed_zero1": {"sharding": "zero1"},
    "deepspeed_zero2": {"sharding": "zero2"},
    "fsdp": {"sharding": "fsdp"},
    "deepspeed_zero3": {"sharding": "zero3", "compile": False},
    "zero3_offload": {"sharding": "zero3", "compile": False, "offload": True},
}
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


def smallest(candidates: Sequence[Changed], fits: Callable[[Changed], bool]) -> list[Changed]:
    """The fewest changes that fit, those that cost least first; of those that change the same keys one, the mildest."""
    found: dict[frozenset[str], Changed] = {}
    for candidate in candidates:
        if found and len(candidate.words) > len(next(iter(found))):
            break
        keys = frozenset(word.partition("=")[0] for word in candidate.words)
        if keys not in found and fits(candidate):
            found[keys] = candidate
    return list(found.values())


def candidates(setup: Setup, blocks: bool, max_nodes: int | None) -> Iterator[Changed]:
    """Up to three changes of different kinds, few before many and cheap before dear; the global batch stays."""
    kinds = [kind for kind in _kinds(setup, blocks, max_nodes) if kind]
    for number in (1, 2, 3):
        for chosen in combinations(kinds, number):
            for changes in product(*chosen):
                fields = {key: value for change in changes for key, value in change.fields.items()}
                if changed := on(setup, setup.global_batch, **fields):
                    yield Changed(tuple(change.word for change in changes), changed)


def _kinds(setup: Setup, blocks: bool, max_nodes: int | None) -> list[list[Change]]:
    """By kind, in the order of what they cost: nothing, time, other hardware, digits."""
    powers = [2**power for power in range(1, 11)]
    smaller = [setup.accumulate * power for power in powers if setup.micro_batch % power == 0]
    nodes = [setup.nodes * power for power in powers if setup.nodes * power <= (max_nodes or MOST_NODES)]
    stricter = list(STRATEGIES)[_strictness(setup) :] if setup.world_size > 1 and setup.tensor_parallel == 1 else []
    again = [Change("strategy.activation_checkpointing=true", {"checkpointing": True})]
    lower = PRECISIONS.get(setup.precision)
    return [
        [Change(f"strategy={name}", STRATEGIES[name]) for name in stricter],
        [Change(f"trainer.accumulate_grad_batches={times}", {"accumulate": times}) for times in smaller],
        again if blocks and not setup.checkpointing else [],
        [Change(f"trainer.num_nodes={number}", {"nodes": number}) for number in nodes if setup.world_size > 1],
        [Change(f"trainer.precision={lower}", {"precision": lower})] if lower else [],
    ]


def _strictness(setup: Setup) -> int:
    """How many of STRATEGIES shard no more than this setup does."""
    names = [fields["sharding"] for fields in STRATEGIES.values()]
    if setup.offload:
        return len(names)
    return names.index(setup.sharding) + 1 if setup.sharding in names else 0
