"""The trace of a training step: its parameters, work and memory. tracer.py makes it. Imports no torch."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class BatchCost:
    """A size that depends on the micro-batch. A contrastive loss compares all pairs, so that it has squares."""

    fixed: float = 0.0
    per_example: float = 0.0
    per_pair: float = 0.0

    def at(self, examples: float) -> float:
        return self.fixed + (self.per_example + self.per_pair * examples) * examples


@dataclass(frozen=True)
class Work:
    """Equal operations. Matrix products, convolutions and attention have FLOPs; all others only move bytes."""

    flops: BatchCost  # of one operation, with two per multiply-add
    bytes: BatchCost  # read and written by one operation
    count: int = 1


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that strategies gather and sum together: those of a block, or all outside the blocks.

    Sizes are those of one rank of a tensor-parallel group.
    """

    name: str  # "block 0", "block 1", ..., or another one
    num_parameters: int  # shared ones count once
    num_trained_per_rank: int  # parameters that are not frozen
    num_parameters_all_ranks: int  # of the whole tensor-parallel group
    num_tensors: int  # that hold the parameters
    buffer_bytes: int

    @property
    def is_block(self) -> bool:
        return self.name.startswith("block")


@dataclass(frozen=True)
class MemoryLevel:
    """The memory at one moment of a step, beyond parameters, buffers and optimizer states."""

    activations: BatchCost  # bytes
    gradients: float  # share of the gradients of parameters that exist; those of the step before stay until backward
    is_head: bool = False  # after the last block: in the head, the loss, and their backward


@dataclass(frozen=True)
class Trace:
    """A training step in one precision, for one degree of tensor parallelism, with activation checkpointing or without.

    Bytes are in the precision in which the step was traced.
    """

    groups: tuple[ParameterGroup, ...]
    unit: str  # "samples" or "tokens"
    tokens_per_example: int  # 1 for samples
    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()  # with what activation checkpointing repeats
    all_reduced: tuple[Work, ...] = ()  # tensors that tensor-parallel ranks sum: their bytes
    levels: tuple[MemoryLevel, ...] = ()  # those that are the highest for some micro-batch
    optimizer_states: float | None = 2.0  # numbers that the optimizer keeps per parameter; None: it could not be tried
    numbers_per_example: int = 0  # in the input
    loader_batch_size: int | None = None  # of the loader of the data; None: it was not needed, or it is unknown
    loader_divides_by_ranks: bool = False  # the batch size that the data's class is given
    note: str = ""  # on the samples with which it was traced
    by_parameters: str = ""  # why only parameters and optimizer states are known, if the step could not be traced
    is_lasting: bool = True  # False: another try may give more, as the data could not be read

    @property
    def num_trained_per_rank(self) -> int:
        """Parameters of a tensor-parallel rank that are not frozen."""
        return sum(group.num_trained_per_rank for group in self.groups)

    @property
    def num_parameters_per_rank(self) -> int:
        """Parameters of a tensor-parallel rank."""
        return sum(group.num_parameters for group in self.groups)

    @property
    def num_parameters(self) -> int:
        """Parameters of the network, over all tensor-parallel ranks."""
        return sum(group.num_parameters_all_ranks for group in self.groups)

    @property
    def by_parameters_note(self) -> str:
        """What a reader must know of a plan whose step could not be traced."""
        return f"planned by parameters alone: {self.by_parameters}; activations are not counted, nor the time of a step"

    @property
    def blocks(self) -> tuple[ParameterGroup, ...]:
        return tuple(group for group in self.groups if group.is_block)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Trace":
        """Return the trace that `to_json` wrote. Raises ValueError, KeyError or TypeError for any other text."""
        fields = json.loads(text)
        works = {key: tuple(map(_work, fields[key])) for key in ("forward", "backward", "all_reduced")}
        groups = tuple(ParameterGroup(**group) for group in fields["groups"])
        return Trace(**fields | works | {"groups": groups, "levels": tuple(map(_level, fields["levels"]))})


def _work(fields: dict[str, Any]) -> Work:
    return Work(BatchCost(**fields["flops"]), BatchCost(**fields["bytes"]), fields["count"])


def _level(fields: dict[str, Any]) -> MemoryLevel:
    return MemoryLevel(BatchCost(**fields["activations"]), fields["gradients"], fields["is_head"])
