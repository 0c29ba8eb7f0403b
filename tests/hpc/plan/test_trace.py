"""Check the trace of a network: sizes, FLOPs and memory, from tensors without content."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fork import PACKAGE
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives

from hpc.config import arguments, compose, parse
from hpc.plan import trace_cache, tracer
from hpc.plan.measured_step import NotTraceable, _tensor_parallel_mesh
from hpc.plan.meter import Meter
from hpc.plan.setup import setup_from_config
from hpc.plan.trace_types import BatchCost, Trace
from hpc.training.fake_tensors import fake_tensor_mode
from my_research.models.gpt import GPT
from my_research.module import Classifier

GPT_SIZES = {"num_layers": 2, "num_heads": 4, "width": 64, "vocab_size": 96, "block_size": 32}
SGD = partial(torch.optim.SGD, lr=0.1)


def small_gpt() -> GPT:
    return GPT(**GPT_SIZES)


def traced(make: Any = small_gpt, optimize: Any = SGD, parameters: str = "32", **how: Any) -> Trace:
    return tracer.trace_step(lambda: Classifier(make(), optimize), parameters, **how)


def flops(trace: Trace, direction: str) -> float:
    return sum(work.count * work.flops.per_example for work in getattr(trace, direction))


def peak(trace: Trace, examples: int, *, is_head: bool | None = None) -> float:
    """Return the most bytes of activations; `is_head`: of the levels with or without the head."""
    levels = [level for level in trace.levels if is_head in (None, level.is_head)]
    return max(level.activations.at(examples) for level in levels)


@pytest.mark.slow
def test_parts_parameters_and_operations_are_those_of_the_network():
    network, trace = GPT(**GPT_SIZES), traced()
    assert [group.name for group in trace.groups] == ["outside the blocks", "block 0", "block 1"]
    assert trace.num_parameters == trace.num_trained_per_rank == sum(p.numel() for p in network.parameters())
    assert trace.blocks[0].num_parameters == sum(p.numel() for p in network.blocks[0].parameters())
    assert trace.blocks[0].num_tensors == len(list(network.blocks[0].parameters()))
    layers, width, time = 2, 64, 32
    weights = trace.num_parameters - sum(p.numel() for p in network.parameters() if p.ndim < 2)
    assert flops(trace, "forward") == time * (2 * weights + 4 * layers * width * time)
    assert (trace.unit, trace.tokens_per_example) == ("tokens", 32)


@pytest.mark.parametrize(("optimize", "kept"), [(SGD, 0), (partial(SGD, momentum=0.9), 1), (torch.optim.AdamW, 2)])
def test_the_states_of_an_optimizer_are_counted(optimize, kept):
    assert traced(optimize=optimize).optimizer_states == pytest.approx(kept, abs=0.01)


def test_an_optimizer_that_cannot_be_tried_is_unknown():
    assert traced(optimize=partial(torch.optim.LBFGS)).optimizer_states is None


def test_memory_grows_with_the_batch_as_the_lines_say(monkeypatch):
    """Check that lines fitted to two small batches hold for a large one, whose peak may be at another moment."""
    small = traced()
    monkeypatch.setattr(tracer, "FEW", 40)
    monkeypatch.setattr(tracer, "MORE", 41)
    large = traced()
    for is_head in (False, True):
        assert peak(small, 40, is_head=is_head) == peak(large, 40, is_head=is_head)


def test_autocast_keeps_half_and_copies_of_weights():
    """Check autocast as with CUDA: normalization stays in fp32."""
    plain, mixed = (end_of_blocks(traced(autocast=autocast)) for autocast in (None, "bf16"))
    weights = sum(p.numel() for p in GPT(**GPT_SIZES).blocks.parameters() if p.ndim == 2)
    assert mixed.fixed - plain.fixed == pytest.approx(2 * weights, rel=0.05)
    assert 0.5 < mixed.per_example / plain.per_example < 0.8


def end_of_blocks(trace: Trace) -> BatchCost:
    """Return the bytes at the end of the last block's forward, when no gradient is there yet but old ones."""
    levels = [level.activations for level in trace.levels if not level.is_head and level.gradients == 1.0]
    return max(levels, key=lambda activations: activations.at(10**6))


def test_checkpointing_repeats_what_backward_needs():
    """Check that a block runs again up to its last product, whose result backward does not need."""
    plain, again = (traced(checkpointing=checkpointing) for checkpointing in (False, True))
    assert flops(again, "forward") == flops(plain, "forward") and again.groups == plain.groups
    layers, width, time = 2, 64, 32
    block = time * (2 * sum(p.numel() for p in small_gpt().blocks[0].parameters() if p.ndim == 2) + 4 * width * time)
    last = 2 * time * 4 * width * width
    assert flops(again, "backward") - flops(plain, "backward") == layers * (block - last)
    assert peak(again, 64) < 0.7 * peak(plain, 64)


@pytest.mark.slow
def test_ranks_that_share_layers_hold_and_do_their_share():
    """Check Megatron's split: two all-reduces forward and two backward for each block's output."""
    whole, half = traced(), traced(tensor_parallel=2)
    again = traced(tensor_parallel=2, checkpointing=True)
    block, shared = whole.blocks[0], half.blocks[0]
    norms = 2 * 64
    assert shared.num_parameters == (block.num_parameters - norms) / 2 + norms
    assert flops(half, "forward") < 0.6 * flops(whole, "forward")
    assert sum(work.count for work in half.all_reduced) == 2 * 4
    assert sum(work.count * work.bytes.per_example for work in half.all_reduced) == 2 * 4 * 32 * 64 * 4
    assert sum(work.count for work in again.all_reduced) in (2 * 5, 2 * 6)  # those of forward, for a second time
    assert not whole.all_reduced


def test_a_gather_and_a_scatter_cost_together_what_an_all_reduce_costs():
    """Check the bytes that tensor-parallel ranks send if they share the sequence: a ring sends half for each."""
    with _tensor_parallel_mesh(2) as mesh, fake_tensor_mode():
        group, whole, shard = mesh.get_group(), torch.zeros(8, 64), torch.zeros(4, 64)
        with Meter(nn.Linear(1, 1)) as meter:
            meter.begin()
            collectives.all_reduce(whole, "sum", group)
            collectives.all_gather_tensor(shard, 0, group)
            collectives.reduce_scatter_tensor(whole, "sum", 0, group)
    assert [operation.bytes for operation in meter.reduced] == [8 * 64 * 4, 4 * 64 * 4, 4 * 64 * 4]


class Looks(nn.Module):
    """A network whose forward depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x

    def example_input(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 4)


def test_an_error_names_the_operation_that_cannot_be_traced():
    where = r"test_trace\.py:\d+, `return .* if x\.sum\(\) > 0 else x`: it needs the value"
    with pytest.raises(NotTraceable, match=where):
        traced(Looks)


def test_a_network_without_blocks_is_one_part():
    trace = traced(lambda: GPTLess())
    assert [group.name for group in trace.groups] == ["outside the blocks"]
    assert trace.num_parameters == 20
    assert trace.unit == "samples"


class GPTLess(Looks):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_a_trace_survives_json():
    trace = traced()
    assert Trace.from_json(trace.to_json()) == trace


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return a config and its setup, with a separate cache."""
    monkeypatch.setattr(trace_cache, "CACHE", tmp_path / "traces")
    cfg = compose.compose_overrides(["model=gpt_tiny", "data=stdlib"])
    parsed = parse.parse(cfg)
    arguments.check_files(parsed)
    return parsed, setup_from_config(parsed)


@pytest.mark.slow
def test_a_trace_is_made_once_and_then_read_from_the_cache(asked, monkeypatch, capsys):
    made = trace_cache.load_trace(*asked)
    assert made.num_parameters == 820_352 and "tracing" in capsys.readouterr().err
    monkeypatch.setattr(trace_cache.subprocess, "run", None)  # from here on the cache must answer without a process
    assert trace_cache.load_trace(*asked) == made
    (file,) = trace_cache.CACHE.iterdir()
    file.write_text(file.read_text()[:-50])  # a crash cut it short
    with pytest.raises(TypeError):
        trace_cache.load_trace(*asked)


@pytest.mark.slow
def test_another_network_is_another_trace(asked, monkeypatch):
    cfg, setup = asked
    trace_cache.load_trace(cfg, setup)
    monkeypatch.setattr(trace_cache.subprocess, "run", None)
    cfg.model.network.width = 64
    with pytest.raises(TypeError):
        trace_cache.load_trace(cfg, setup)


def test_a_cache_that_cannot_be_written_is_no_error(asked, monkeypatch):
    monkeypatch.setattr(trace_cache, "CACHE", trace_cache.PROJECT / "train.py" / "no folder")
    monkeypatch.setattr(trace_cache, "_run_tracer", lambda question: traced())
    assert trace_cache.load_trace(*asked).num_parameters


@pytest.mark.soak
@pytest.mark.slow
def test_an_error_of_the_tracers_process_is_reported(asked):
    cfg, setup = asked
    cfg.model.network.num_heads = 3
    trace = trace_cache.load_trace(cfg, setup)
    assert re.search(r"gpt.py:\d+, `.*`: RuntimeError: shape .* is invalid.*aten.view.default", trace.by_parameters)
    cfg.model.network["_target_"] = "no.such.thing"
    with pytest.raises(trace_cache.TracingError, match="No module named 'no'"):
        trace_cache.load_trace(cfg, setup)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(nn.functional.one_hot(tokens % 16, 16).float())[0])

    def example_input(self, batch_size: int) -> Tensor:
        return torch.zeros(batch_size, 10, dtype=torch.int64)


def test_the_products_of_a_recurrent_network_are_counted():
    steps, gates = 10, 4 * 32
    counted = flops(traced(Recurrent), "forward")
    assert counted == pytest.approx(2 * steps * (gates * (16 + 32) + 32 * 8))


def test_frozen_parameters_are_counted_apart():
    def frozen() -> GPT:
        network = GPT(**GPT_SIZES)
        network.blocks.requires_grad_(False)
        return network

    trace = traced(frozen)
    in_blocks = sum(p.numel() for p in GPT(**GPT_SIZES).blocks.parameters())
    assert trace.num_parameters - trace.num_trained_per_rank == in_blocks


def test_a_trace_is_of_all_sources_that_a_network_may_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trace_cache, "PROJECT", tmp_path)
    monkeypatch.setattr(trace_cache, "SOURCES", tmp_path / "src")
    package = f"src/{PACKAGE}"
    sources = [f"{package}/models/net.py", f"{package}/data/text.py", "src/another/net.py", "src/net.py"]
    sources += ["constraints.txt", "src/hpc/strategies/blocks.py"]  # of a copy of hpc that its owner changes
    library = tmp_path / "clone" / "src" / "hpc"
    monkeypatch.setattr(trace_cache, "LIBRARY", library)
    beside = library / "plan" / "tracer.py"
    for path in [*(tmp_path / name for name in sources), beside]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("width = 1\n")
    seen: set[str] = set()

    def is_new(version: str = "0.3.0+gabc") -> bool:
        monkeypatch.setattr(trace_cache, "library_version", lambda: version)
        digest, num_seen = trace_cache._digest({}), len(seen)
        seen.add(digest)
        return len(seen) > num_seen

    assert is_new() and not is_new()
    for name in sources:
        (tmp_path / name).write_text("width = 2\n")
        assert is_new(), name
    assert is_new("0.3.0+gdef") and is_new("0.3.0+gabc.dirty") and is_new("0.3.0+unknown")
    beside.write_text("width = 2\n")
    assert not is_new() and is_new("0.3.0+gabc.dirty") and is_new("0.3.0+unknown")


def test_the_root_cause_of_an_error_is_reported():
    def broken() -> Any:
        try:
            raise ModuleNotFoundError("No module named 'nowhere'")
        except ModuleNotFoundError as error:
            raise RuntimeError("Error loading 'net':\n") from error

    with pytest.raises(NotTraceable, match="ModuleNotFoundError: No module named 'nowhere'"):
        tracer.trace_step(broken)
