"""What is known of a network without running it: sizes, work and memory of its parts. Written by trace.py; no torch."""

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Linear:
    """A size that grows with the micro-batch."""

    fixed: float = 0.0
    each: float = 0.0  # per example

    def at(self, examples: float) -> float:
        return self.fixed + self.each * examples


def highest(lines: tuple[Linear, ...], examples: float) -> float:
    return max(line.at(examples) for line in lines)


@dataclass(frozen=True)
class Work:
    """Equal operations. Matrix products, convolutions and attention have FLOPs; the rest only moves bytes."""

    flops: Linear  # of one of them, a multiply-add counted as two
    bytes: Linear  # read and written by one of them
    count: int = 1


@dataclass(frozen=True)
class Part:
    """A block, or what stands before, between or behind the blocks, or the loss; in the order of forward.

    Sizes are of one rank of a tensor-parallel group; bytes in the precision that the network was traced in.
    """

    name: str
    parameters: int  # numbers, shared ones counted where they are used first
    trained: int  # of them; the others are frozen
    whole: int  # of all ranks of the group, once
    tensors: int  # that these parameters are
    buffer_bytes: int
    kept: Linear  # alive after its forward that was not before: for backward, and its output
    output: Linear  # handed to the next part
    forward_peak: tuple[Linear, ...]  # alive at most during its forward, above what was before: the highest of them
    backward_peak: tuple[Linear, ...]  # the same of its backward, without gradients of parameters
    left: Linear  # alive after its backward that was not before its forward: the gradient of its input, and the like
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    reduced: tuple[Work, ...]  # tensors summed by the tensor-parallel ranks, forward and backward: their bytes
    again: tuple[Work, ...] = ()  # of forward, what checkpointing repeats: up to the last tensor that backward needs


@dataclass(frozen=True)
class Trace:
    """A network in one precision, for one degree of tensor parallelism."""

    parts: tuple[Part, ...]
    examples_are: str  # "samples" or "tokens"
    tokens: int  # per example; 1 for samples
    tensor_parallel: int = 1
    states: float | None = 2.0  # numbers that the optimizer keeps per parameter; None: it could not be tried
    inputs: int = 0  # numbers in an example

    @property
    def trained(self) -> int:
        """Parameters of a tensor-parallel rank that are not frozen."""
        return sum(part.trained for part in self.parts)

    @property
    def whole(self) -> int:
        """Parameters of the network, over all tensor-parallel ranks."""
        return sum(part.whole for part in self.parts)

    @property
    def blocks(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.name.startswith("block"))

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> "Trace":
        """Raises ValueError, KeyError or TypeError where `text` is not what `dump` wrote."""
        known = json.loads(text)
        return Trace(**known | {"parts": tuple(_part(one) for one in known["parts"])})


def _part(known: dict[str, Any]) -> Part:
    linear: dict[str, Any] = {key: Linear(**known[key]) for key in ("kept", "output", "left")}
    for key in ("forward_peak", "backward_peak"):
        linear[key] = tuple(Linear(**line) for line in known[key])
    directions = ("forward", "backward", "reduced", "again")
    work: dict[str, Any] = {key: tuple(_work(one) for one in known[key]) for key in directions}
    return Part(**known | linear | work)


def _work(known: dict[str, Any]) -> Work:
    return Work(Linear(**known["flops"]), Linear(**known["bytes"]), known["count"])
