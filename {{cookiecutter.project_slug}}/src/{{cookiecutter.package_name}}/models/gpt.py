"""GPT: a decoder-only transformer (Radford et al., 2019) with rotary position embeddings and without biases."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F


class GPT(nn.Module):
    """Map tokens (batch, time), int64, to logits (batch, time, classes).

    Args:
        num_layers: number of transformer blocks.
        num_heads: attention heads per block; `width` must be divisible by it.
        width: size of the hidden states.
        vocab_size: larger than every token.
        block_size: longest sequence.
        vocab_multiple: the number of classes is `vocab_size` rounded up to a multiple of this. Matrix products of
            such sizes are faster; the added classes are never targets.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        width: int,
        vocab_size: int,
        block_size: int,
        *,
        dropout: float = 0.0,
        vocab_multiple: int = 1,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        num_classes = -(-vocab_size // vocab_multiple) * vocab_multiple  # rounded up
        self.token = nn.Embedding(num_classes, width)
        self.drop = nn.Dropout(dropout)
        # hpc finds parts by name: it shards, compiles and recomputes `blocks`; fine-tuning trains only `head` at first.
        self.blocks = nn.ModuleList(Block(width, width // num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, num_classes, bias=False)
        self._init_weights(num_layers)
        self.head.weight = self.token.weight  # weight tying (Press and Wolf, 2017)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.token(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def example_input(self, batch_size: int) -> Tensor:
        """Return tokens of the largest size: for plan.py and for tests."""
        return torch.zeros(batch_size, self.block_size, dtype=torch.int64)

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """Return Megatron's plan (Shoeybi et al., 2019): split heads and hidden units; two all-reduces per block."""
        return {
            "blocks.*.attention.qkv": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
        }

    def _init_weights(self, num_layers: int) -> None:
        """Initialize as GPT-2: N(0, 0.02), scaled by 1 / sqrt(2 * layers) where a layer adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            is_residual = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if is_residual else 0.02)


class Block(nn.Module):
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, head_dim, dropout)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Attention(nn.Module):
    """Causal self-attention by PyTorch's scaled_dot_product_attention, which uses flash kernels where it can."""

    def __init__(self, width: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = head_dim, dropout
        # Rows are ordered by head, and within a head by q, k, v, so that a tensor-parallel rank gets whole heads.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads = self.qkv(x).view(batch, time, -1, 3 * self.head_dim).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)
        q, k = apply_rotary(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


def apply_rotary(*vectors: Tensor) -> list[Tensor]:
    """Rotate queries and keys by angles that grow with the position, so that attention sees relative positions.

    Args:
        vectors: queries and keys, each (batch, heads, time, head_dim) with an even head_dim.

    Source: RoPE (Su et al., 2021).
    """
    time, head_dim = vectors[0].shape[-2:]
    pair = torch.arange(head_dim // 2, device=vectors[0].device)
    angle = torch.arange(time, device=vectors[0].device)[:, None] * 10_000 ** (-2 * pair / head_dim)
    cos, sin = angle.cos().to(vectors[0].dtype), angle.sin().to(vectors[0].dtype)
    halves = [vector.chunk(2, dim=-1) for vector in vectors]
    return [torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1) for a, b in halves]
