"""Train a GPT in a fast hand-written loop, in one file: python benchmarks/plain_gpt.py tokens.bin

If PMI_SIZE is in the environment, this process is one of several ranks.
"""

import argparse
import math
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from turns import wait_for_turn

RANK, SIZE = int(os.environ.get("PMI_RANK", 0)), int(os.environ.get("PMI_SIZE", 1))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, self.heads, -1).transpose(1, 2).chunk(3, dim=-1)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class GPT(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, vocab: int, block: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocab, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
        self.head.weight = self.token.weight
        pair = torch.arange(width // heads // 2)
        angle = torch.arange(block)[:, None] * 10_000 ** (-2 * pair / (width // heads))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batches(file: str, batch: int, block: int):
    """Yield this rank's windows in random order. The next one is copied to the device while a step runs."""
    tokens = np.memmap(file, dtype=np.uint16, mode="r")
    windows, generator, ahead = (len(tokens) - 1) // block, np.random.default_rng(0), None
    offsets = np.arange(block + 1)
    while True:
        order = generator.permutation(windows)
        for first in range(0, windows - batch * SIZE + 1, batch * SIZE):
            mine = order[first + RANK * batch : first + (RANK + 1) * batch]
            chosen = torch.from_numpy(tokens[mine[:, None] * block + offsets].astype(np.int64))
            chosen = chosen.pin_memory().to(DEVICE, non_blocking=True) if DEVICE.type == "cuda" else chosen
            if ahead is not None:
                yield ahead[:, :-1], ahead[:, 1:]
            ahead = chosen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tokens")
    sizes = {"layers": 12, "heads": 12, "width": 768, "vocab": 50304, "block": 1024, "batch": 32}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    if SIZE > 1:
        dist.init_process_group("gloo", init_method="env://", rank=RANK, world_size=SIZE)
    gpt = GPT(arguments.layers, arguments.heads, arguments.width, arguments.vocab, arguments.block).to(DEVICE)
    matrices = [weight for weight in gpt.parameters() if weight.ndim == 2]
    vectors = [weight for weight in gpt.parameters() if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 700))
    step: nn.Module = gpt
    if SIZE > 1:
        step = nn.parallel.DistributedDataParallel(gpt, gradient_as_bucket_view=True, broadcast_buffers=False)
    if arguments.compile:
        step = torch.compile(step)  # type: ignore[assignment]
    board = SummaryWriter(tempfile.mkdtemp()) if RANK == 0 else None
    data = batches(arguments.tokens, arguments.batch // SIZE, arguments.block)
    for number, (tokens, targets) in enumerate(tqdm(data, mininterval=1.0, disable=RANK > 0)):
        wait_for_turn()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
            loss = step(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if number % 50 == 49 and board:
            board.add_scalar("loss", loss.item(), number)
            board.add_scalar("norm", norm.item(), number)


if __name__ == "__main__":
    main()
