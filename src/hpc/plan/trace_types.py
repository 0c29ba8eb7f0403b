"""The trace of a training step: sizes, work and memory of its parts. tracer.py makes it. Imports no torch."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class BatchCost:
    """A size that depends on the micro-batch. A contrastive loss compares all pairs, so that it has squares."""

    fixed: float = 0.0
    per_example: float = 0.0
    per_pair: float = 0.0

    def at(self, examples: float) -> float:
        return self.fixed + (self.per_example + self.per_pair * examples) * examples


def highest(curves: tuple[BatchCost, ...], examples: float) -> float:
    """Return the highest of several sizes at a micro-batch."""
    return max(curve.at(examples) for curve in curves)


@dataclass(frozen=True)
class Work:
    """Equal operations. Matrix products, convolutions and attention have FLOPs; all others only move bytes."""

    flops: BatchCost  # of one operation, with two per multiply-add
    bytes: BatchCost  # read and written by one operation
    count: int = 1


@dataclass(frozen=True)
class Part:
    """A part of a network, in the order of forward: a block, what lies before or after the blocks, or the loss.

    Sizes are those of one rank of a tensor-parallel group. Bytes are in the precision in which the network was traced.
    """

    name: str
    num_parameters: int  # shared ones count where they are used first
    num_trained_per_rank: int  # parameters that are not frozen
    num_parameters_all_ranks: int  # of the whole tensor-parallel group
    num_tensors: int  # that hold the parameters
    buffer_bytes: int
    saved: BatchCost  # bytes that its forward leaves alive: its output, and what backward needs
    output: BatchCost  # bytes handed to the next part
    forward_peak: tuple[
        BatchCost, ...
    ]  # bytes alive at most in forward, beyond those before it: the highest curve counts
    backward_peak: tuple[BatchCost, ...]  # the same for backward, without gradients of parameters
    leftover: BatchCost  # bytes that its backward leaves alive beyond those before its forward, as its input's gradient
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    all_reduced: tuple[Work, ...]  # tensors that tensor-parallel ranks sum, in forward and backward: their bytes
    recomputed: tuple[Work, ...] = ()  # work of forward that activation checkpointing repeats


@dataclass(frozen=True)
class Trace:
    """A training step in one precision, for one degree of tensor parallelism."""

    parts: tuple[Part, ...]
    unit: str  # "samples" or "tokens"
    tokens_per_example: int  # 1 for samples
    tensor_parallel: int = 1
    optimizer_states: float | None = 2.0  # numbers that the optimizer keeps per parameter; None: it could not be tried
    numbers_per_example: int = 0  # in the input
    loader_batch_size: int | None = None  # of the loader of the data; None: it was not needed, or it is unknown
    loader_divides_by_ranks: bool = False  # the batch size that the data's class is given
    note: str = ""  # on the samples with which it was traced
    checkpointed_parts: tuple[Part, ...] = ()  # with activation checkpointing, if it was measured and not derived
    by_parameters: str = ""  # why only parameters and optimizer states are known, if the step could not be traced
    is_lasting: bool = True  # False: another try may give more, as the data could not be read

    def with_checkpointing(self, checkpointing: bool) -> "Trace":
        """Return the trace of a step with or without activation checkpointing."""
        return replace(self, parts=self.checkpointed_parts) if checkpointing and self.checkpointed_parts else self

    @property
    def num_trained_per_rank(self) -> int:
        """Parameters of a tensor-parallel rank that are not frozen."""
        return sum(part.num_trained_per_rank for part in self.parts)

    @property
    def num_parameters_per_rank(self) -> int:
        """Parameters of a tensor-parallel rank."""
        return sum(part.num_parameters for part in self.parts)

    @property
    def num_parameters(self) -> int:
        """Parameters of the network, over all tensor-parallel ranks."""
        return sum(part.num_parameters_all_ranks for part in self.parts)

    @property
    def by_parameters_note(self) -> str:
        """What a reader must know of a plan whose step could not be traced."""
        return f"planned by parameters alone: {self.by_parameters}; activations are not counted, nor the time of a step"

    @property
    def blocks(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.name.startswith("block"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Trace":
        """Return the trace that `to_json` wrote. Raises ValueError, KeyError or TypeError for any other text."""
        fields = json.loads(text)
        parts = {key: tuple(map(_part, fields[key])) for key in ("parts", "checkpointed_parts")}
        return Trace(**fields | parts)


def _part(fields: dict[str, Any]) -> Part:
    linear: dict[str, Any] = {key: BatchCost(**fields[key]) for key in ("saved", "output", "leftover")}
    for key in ("forward_peak", "backward_peak"):
        linear[key] = tuple(BatchCost(**line) for line in fields[key])
    work_keys = ("forward", "backward", "all_reduced", "recomputed")
    work: dict[str, Any] = {key: tuple(_work(item) for item in fields[key]) for key in work_keys}
    return Part(**fields | linear | work)


def _work(fields: dict[str, Any]) -> Work:
    return Work(BatchCost(**fields["flops"]), BatchCost(**fields["bytes"]), fields["count"])
