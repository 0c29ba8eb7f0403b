"""The trace of a decoder-only transformer, computed from its sizes, as published networks are not in the project.

It has the operations that PyTorch runs one by one, in 16 bit; bytes are those read and written. The project must be on
sys.path.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpc.plan.trace_types import BatchCost, ParameterGroup, Trace, Work

NUMBER_BYTES = 2
Works = Sequence[Work]


@dataclass(frozen=True)
class Part:
    """A part of a network: a block, what lies before or after the blocks, or the loss."""

    group: ParameterGroup
    forward: Works
    backward: Works
    again: Works  # what activation checkpointing repeats
    sums: Works  # over tensor-parallel ranks

    @property
    def is_block(self) -> bool:
        return self.group.is_block


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder, and how its operations are implemented.

    attention: "flash" keeps no matrix of weights. "whole" writes and reads it, as fused kernels for softmax do.
    "again" computes it again in the backward pass (arXiv 2205.05198, section 5).
    """

    layers: int
    width: int
    heads: int
    vocab: int
    time: int = 2048
    kv_heads: int = 0  # 0: as many as heads
    hidden: int = 0  # 0: 4 * width
    gated: bool = False  # SwiGLU
    rotary: bool = False
    biases: bool = False
    attention: str = "flash"
    dropout: bool = False
    unpadded: bool = False  # queries, keys, values and the result are gathered and scattered around attention
    fused_loss: bool = False  # cross-entropy in one pass over 16-bit logits
    metrics: int = 0  # cross-entropies of each batch that are only logged
    tensor_parallel: int = 1
    whole_again: bool = False  # checkpointing repeats the whole forward pass, not only what the backward pass needs
    sequence_parallel: bool = False  # operations outside tensor parallelism are split along the sequence

    def trace(self, *, checkpointing: bool = False) -> Trace:
        parts = self.parts()
        repeated = [part for part in parts if checkpointing and part.is_block]
        sums = [work for part in parts for work in part.sums]
        sums += [replace(work, count=work.count // 2) for part in repeated for work in part.sums]
        backward = [work for part in parts for work in part.backward]
        return Trace(
            groups=tuple(part.group for part in parts),
            unit="tokens",
            tokens_per_example=self.time,
            forward=tuple(work for part in parts for work in part.forward),
            backward=(*backward, *(work for part in repeated for work in part.again)),
            all_reduced=tuple(sums),
        )

    def parts(self) -> list[Part]:
        """Return the parts in the order of forward."""
        return [self._before(), *([self._block()] * self.layers), self._after(), self._loss()]

    @property
    def output_bytes(self) -> int:
        """The bytes of an example that a block hands on."""
        return NUMBER_BYTES * self.time * self.width

    @property
    def _qkv(self) -> float:
        """The width of queries, keys and values together."""
        return self.width * (1 + 2 * (self.kv_heads or self.heads) / self.heads)

    def _block(self) -> Part:
        d, t, h = self.width, self.tensor_parallel, self.hidden or 4 * self.width
        shapes = [(d, self._qkv / t), (d / t, d), (d, h / t), (h / t, d)] + [(d, h / t)] * self.gated
        forward = [self._product(*shape) for shape in shapes]
        backward = [self._product(*shape) for shape in shapes for _ in "xw"]
        for direction, works in (("forward", forward), ("backward", backward)):
            works += self._attention(direction)
            works += [self._moves(numbers) for numbers in self._between(direction)]
        parameters = sum(a * b for a, b in shapes) + 2 * d + self.biases * (self._qkv / t + d + h / t + d + 2 * d)
        tensors = len(shapes) + 2 + self.biases * (len(shapes) + 2)
        sums = (Work(BatchCost(), BatchCost(per_example=NUMBER_BYTES * self.time * d), 4),) if t > 1 else ()
        last = 0 if self.whole_again else 1  # the last product: the backward pass does not need its result
        again = [*forward[:3], *forward[3 + last :]]
        return self._part("block", parameters, tensors, forward, backward, again, sums)

    def _between(self, direction: str) -> Iterator[float]:
        """Yield how many numbers per token each operation between the products reads and writes."""
        backward = direction == "backward"
        d, split = self.width, self.tensor_parallel
        outside = split if self.sequence_parallel else 1
        yield from [(3 if backward else 2) * d / outside] * 2  # norms
        yield from [3 * d / outside] * 2  # sums with the residual stream
        if self.dropout:
            yield from [2.5 * d / outside] * 2  # a mask of bytes
        h = (self.hidden or 4 * d) / split
        yield from ([5 * h, 3 * h] if backward else [2 * h, 3 * h]) if self.gated else [(3 if backward else 2) * h]
        yield 2 * d / split  # heads are concatenated
        if backward:
            yield 4 * self._qkv / split  # gradients of queries, keys and values in one piece
        if self.unpadded:
            yield 2 * (self._qkv + d) / split
        if self.rotary:
            turned = self._qkv * 2 / 3 / split if not self.kv_heads else (d + (self._qkv - d) / 2) / split
            yield from [turned / 2] * (20 if backward else 18)  # halves: products, sums, and put together
        if self.biases and backward:
            yield from [self._qkv / split, d / outside, h, d / outside]

    def _attention(self, direction: str) -> list[Work]:
        """Return the work of attention. Flash: 2 products forward, 5 backward, counted as not causal."""
        d, t, backward = self.width / self.tensor_parallel, self.time, direction == "backward"
        product = 2 * t * t * d
        if self.attention == "flash":
            moved = NUMBER_BYTES * t * (d + self._qkv / self.tensor_parallel)
            return [
                Work(
                    BatchCost(per_example=(5 if backward else 2) * product),
                    BatchCost(per_example=(2 if backward else 1) * moved),
                )
            ]
        weights = self.heads / self.tensor_parallel * t * t  # per example
        once = [self._over(product, weights)] * 2 + [
            Work(BatchCost(), BatchCost(per_example=NUMBER_BYTES * 2 * weights))
        ]
        if self.dropout:
            once.append(Work(BatchCost(), BatchCost(per_example=(NUMBER_BYTES * 2 + 1) * weights)))
        if not backward:
            return once
        return once * 2 + ([once[0], *once[2:]] if self.attention == "again" else [])

    def _over(self, flops: float, weights: float) -> Work:
        return Work(BatchCost(per_example=flops), BatchCost(per_example=NUMBER_BYTES * weights))

    def _product(self, a: float, b: float) -> Work:
        """Return the work of the matrix product of (tokens, a) and (a, b)."""
        return Work(
            BatchCost(per_example=2 * self.time * a * b),
            BatchCost(NUMBER_BYTES * a * b, NUMBER_BYTES * self.time * (a + b)),
        )

    def _moves(self, numbers: float) -> Work:
        return Work(BatchCost(), BatchCost(per_example=NUMBER_BYTES * self.time * numbers))

    def _before(self) -> Part:
        lookup = [self._moves(2 * self.width)]
        return self._part("before", self.vocab * self.width / self.tensor_parallel, 1, lookup, lookup)

    def _after(self) -> Part:
        shape = self.width, self.vocab / self.tensor_parallel
        norm = [self._moves(2 * self.width)], [self._moves(3 * self.width)]
        return self._part(
            "after", self.width, 1, norm[0] + [self._product(*shape)], norm[1] + [self._product(*shape)] * 2
        )

    def _loss(self) -> Part:
        """Return the loss: logits in fp32 and their log-softmax, as with autocast; or one pass over 16-bit logits."""
        classes = self.vocab / self.tensor_parallel
        forward, backward = ((1,), (2,)) if self.fused_loss else ((3, 4, 2), (2, 6, 3))
        forward += (3, 4, 2) * self.metrics
        works = [[self._moves(classes * numbers) for numbers in direction] for direction in (forward, backward)]
        return self._part("loss", 0, 0, *works)

    def _part(
        self,
        name: str,
        parameters: float,
        tensors: int,
        forward: Works,
        backward: Works,
        again: Works = (),
        sums: Works = (),
    ) -> Part:
        numbers = round(parameters)
        group = ParameterGroup(name, numbers, numbers, numbers * self.tensor_parallel, tensors, buffer_bytes=0)
        return Part(group, forward, backward, again, sums)
