"""GPT: a decoder-only transformer (Radford et al., 2019) with rotary positions and without biases."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F


class GPT(nn.Module):
    """Tokens (batch, time) int64 → logits (batch, time, classes); time is at most block_size.

    Args:
        vocab_multiple: there are so many classes that they are a multiple of it, at least vocab_size; those on top are
            never right. Matrix products are fast for sizes that tiles of the hardware divide.
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
        classes = -(-vocab_size // vocab_multiple) * vocab_multiple
        self.token = nn.Embedding(classes, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, width // num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, classes, bias=False)
        self._init_weights(num_layers)
        self.head.weight = self.token.weight  # tied (Press and Wolf, 2017)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.token(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def example_input(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, self.block_size, dtype=torch.int64)

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """Megatron's split (Shoeybi et al., 2019): heads and hidden units are shared out, two all-reduces per block."""
        return {
            "blocks.*.attention.qkv": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
        }

    def _init_weights(self, num_layers: int) -> None:
        """GPT-2's: N(0, 0.02), and what adds to the residual stream scaled by 1 / sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            residual = name.endswith(("attention.out.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers) if residual else 0.02)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

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
    """Causal self-attention; flash or memory-efficient kernels through PyTorch's SDPA."""

    def __init__(self, width: int, head_dim: int, dropout: float) -> None:
        super().__init__()
        self.head_dim, self.dropout = head_dim, dropout
        # Rows are ordered head by head, q, k, v within each: a tensor-parallel rank gets whole heads.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        heads = self.qkv(x).view(batch, time, -1, 3 * self.head_dim).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)
        q, k = rotated(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


def rotated(*vectors: Tensor) -> list[Tensor]:
    """Queries and keys (batch, heads, time, head_dim), each turned by an angle that grows with its position.

    Their products then depend on how far apart two positions are (RoPE; Su et al., 2021).
    """
    time, head_dim = vectors[0].shape[-2:]
    pair = torch.arange(head_dim // 2, device=vectors[0].device)
    angle = torch.arange(time, device=vectors[0].device)[:, None] * 10_000 ** (-2 * pair / head_dim)
    cos, sin = angle.cos().to(vectors[0].dtype), angle.sin().to(vectors[0].dtype)
    halves = [vector.chunk(2, dim=-1) for vector in vectors]
    return [torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1) for a, b in halves]
