"""Check that a step that is traced on the CPU is planned as CUDA computes it."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hpc.plan.cuda_emulation import emulate_cuda
from hpc.plan.tracer import trace_step
from my_research.models.gpt import GPT
from my_research.module import Classifier

SGD = partial(torch.optim.SGD, lr=0.1)
WAYS: dict[str, Callable[[Tensor], Tensor]] = {  # to write operations that CUDA's autocast computes in fp32
    "softmax": lambda a: a.softmax(-1),
    "torch.softmax": lambda a: torch.softmax(a, -1),
    "F.softmax": lambda a: F.softmax(input=a, dim=-1),
    "nn.Softmax": nn.Softmax(-1),
    "inside another function": lambda a: F.gumbel_softmax(a),
    "log_softmax": lambda a: a.log_softmax(-1),
    "operator": lambda a: a**2,
    "pow": lambda a: a.pow(2),
    "exp": lambda a: a.exp(),
    "sum": lambda a: a.sum(-1),
    "layer_norm": lambda a: F.layer_norm(a, a.shape[-1:]),
    "cross_entropy": lambda a: F.cross_entropy(a, torch.zeros(len(a), dtype=torch.int64)),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_cuda_computes_in_fp32_is_in_fp32_however_it_is_written(way: str):
    with FakeTensorMode():
        tensor = torch.empty(4, 8, dtype=torch.bfloat16)
        with emulate_cuda(), torch.autocast("cpu", torch.bfloat16):
            assert WAYS[way](tensor).dtype == torch.float32
            assert F.gelu(tensor).dtype == torch.bfloat16
            assert (torch.empty(4, 4) @ torch.empty(4, 4)).dtype == torch.bfloat16
            assert WAYS[way](torch.empty(4, 8, dtype=torch.float64)).dtype == torch.float64
    assert torch.zeros(4, 8, dtype=torch.bfloat16).softmax(-1).dtype == torch.bfloat16  # the block has ended


class Attention(nn.Module):
    """A network whose memory is nearly that of its weights of attention, which it normalizes by `normalize`."""

    def __init__(self, normalize: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.normalize, self.layer = normalize, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return (self.normalize(x @ x.mT) @ x).mean(1)

    def example_input(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 64, 4)


def test_attention_takes_the_same_memory_however_its_softmax_is_written():
    saved = {}
    for way in ("softmax", "F.softmax"):
        trace = trace_step(lambda way=way: Classifier(Attention(WAYS[way]), SGD), "32", "bf16")
        saved[way] = max(level.activations.at(8) for level in trace.levels)
    assert saved["softmax"] == saved["F.softmax"] > 8 * 64 * 64 * 4


class Normalized(nn.Module):
    """A network of blocks that normalize in fp32 between products in 16 bit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.GroupNorm(2, 16), nn.Linear(16, 4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def example_input(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 4)


def test_what_checkpointing_computes_again_is_cast_again():
    plain, again = (
        trace_step(lambda: Classifier(Normalized(), SGD), "32", "bf16", checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    assert plain.forward == again.forward
    flops = [sum(w.count * w.flops.per_example for w in trace.backward) for trace in (plain, again)]
    assert flops[1] - flops[0] == 3 * 2 * 4 * 16  # the first product of each block


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, "bf16"])
def test_dropout_in_attention_costs_nothing(autocast: str | None):
    def gpt(dropout: float) -> Classifier:
        return Classifier(GPT(num_layers=1, num_heads=4, width=64, vocab_size=96, block_size=64, dropout=dropout), SGD)

    class Dropless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    def with_dropout() -> Classifier:
        module = gpt(0.1)  # of its attention alone
        for part in list(module.modules()):
            for name, child in part.named_children():
                if isinstance(child, nn.Dropout):
                    setattr(part, name, Dropless())
        return module

    without, dropping = (trace_step(make, "32", autocast) for make in (partial(gpt, 0.0), with_dropout))
    assert without.levels == dropping.levels and without.forward == dropping.forward


def test_attention_is_as_before_after_the_block():
    query = torch.randn(1, 2, 8, 4)
    plain = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with emulate_cuda():
        assert torch.equal(plain, F.scaled_dot_product_attention(query, query, query, None, 0.5, is_causal=True))
        layer = nn.MultiheadAttention(4, 2, dropout=0.5)
        outputs = [layer(query[0], query[0], query[0], need_weights=False)[0] for _ in range(2)]
        assert torch.equal(*outputs)
    assert not torch.equal(plain, F.scaled_dot_product_attention(query, query, query, None, 0.5, is_causal=True))
