"""Compare the predicted peak memory of a GPU with torch's own tracker and with real ranks."""

import json
from dataclasses import replace
from functools import partial

import pytest
from tracked import tracked

from hpc.config import build, compose
from hpc.plan import tracer
from hpc.plan.memory import Memory, predict_memory, state_bytes
from hpc.plan.setup import ParallelLayout, setup_from_config
from hpc.plan.trace_types import BatchCost, MemoryLevel, ParameterGroup, Trace

GPT = ["model=gpt_124m", "data=stdlib", "data.block_size=1024", "data.vocab_size=50257"]
RESNET = ["model=resnet50", "data=packed", "data.file=x", "+data.image_size=224", "+data.num_classes=1000"]


def planned(*words: str) -> tuple:
    cfg = compose.compose_overrides(words)
    layout = setup_from_config(cfg)
    checkpointing = layout.checkpointing
    trace = tracer.trace_step(partial(build.build, cfg.model), *layout.computes_in, checkpointing=checkpointing)
    return cfg, layout, predict_memory(trace, layout)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("again", ["false", "true"])
@pytest.mark.parametrize("network", [GPT, RESNET], ids=["gpt", "resnet"])
def test_peak_is_what_torchs_tracker_sees(network, again, precision, batch):
    words = [f"strategy.activation_checkpointing={again}", f"trainer.precision={precision}"]
    cfg, layout, found = planned(*network, *words, f"data.global_batch_size={batch}")
    assert found.total == pytest.approx(tracked(cfg, layout), rel=0.02)


# Writes the bytes of each rank when the optimizer steps; its state exists from the second step on.
HELD = """
import json, os
from hpc.resume.resume import Resume

def size(tensors):
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in local if tensor.numel() > 1)

def before(self, trainer, module, optimizer):
    if trainer.global_step != 2:
        return
    engine, parameters = getattr(trainer.strategy, "deepspeed_engine", None), list(module.parameters())
    state = [value for kept in optimizer.state.values() for value in kept.values() if hasattr(value, "numel")]
    held = {"weights": size(parameters), "gradients": size(p.grad for p in parameters), "optimizer": size(state)}
    if engine is not None:
        zero = engine.optimizer
        state = [value for kept in zero.optimizer.state.values() for value in kept.values() if hasattr(value, "numel")]
        masters = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
        held["optimizer"] = size(state) + size(masters)
        if hasattr(parameters[0], "ds_tensor"):
            held["weights"] = size(p.ds_tensor for p in parameters)
        del held["gradients"]
    with open(os.path.join(trainer.default_root_dir, f"held-{trainer.global_rank}.json"), "w") as stream:
        json.dump(held, stream)

Resume.on_before_optimizer_step = before
"""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"])
def test_states_are_what_ranks_hold(strategy, start, tmp_path):
    """Compare bytes of weights, gradients and optimizer states with two real ranks on CPU."""
    words = ["trainer=ddp", f"strategy={strategy}", "trainer.accelerator=cpu", "trainer.devices=2"]
    words += ["trainer.max_steps=4"]
    words += ["model=gpt_tiny", "data=stdlib", "trainer.precision=32-true", "data.block_size=32", "callbacks=default"]
    words += ["callbacks.progress.refresh_rate=0", "data.max_eval_windows=8"]
    start(tmp_path / "run", 2, words, patch=HELD)
    *_, found = planned(*words)
    for rank in range(2):
        for name, size in json.loads((tmp_path / "run" / f"held-{rank}.json").read_text()).items():
            assert getattr(found, name) == pytest.approx(size, rel=0.01), f"rank {rank}: {name}"


def test_states_follow_the_papers_table():
    """Check 16 bytes per parameter with mixed precision and Adam, and the share of each stage (ZeRO, section 3)."""
    half = partial(ParallelLayout, nodes=16, devices=4, micro_batch=1, precision="bf16-mixed")
    kinds = ("none", "zero1", "zero2", "zero3", "fsdp")
    whole = {kind: sum(state_bytes(1e9, 1e9, optimizer_states=2.0, setup=half(sharding=kind))) / 1e9 for kind in kinds}
    assert whole == {
        "none": 16,
        "zero1": pytest.approx(4 + 12 / 64),
        "zero2": pytest.approx(2 + 14 / 64),
        "zero3": pytest.approx(16 / 64),
        "fsdp": pytest.approx(16 / 64),
    }


def test_total_is_the_sum():
    assert Memory(1, 2, 3, 4, 5, 6, 7).total == 28


def test_a_frozen_parameter_has_no_gradient_and_no_average():
    alone = ParallelLayout(nodes=1, devices=1, micro_batch=1, precision="32-true")
    assert state_bytes(1e9, 1e6, optimizer_states=2.0, setup=alone) == (4e9, 4e6, 8e6)
    sharded = replace(alone, devices=4, sharding="zero2", precision="bf16-mixed")
    assert state_bytes(1e9, 1e6, optimizer_states=2.0, setup=sharded) == (2e9, 5e5, 3e6)


def test_gradients_that_come_late_count_late_unless_they_stay():
    """Check a step whose activations are the most before any gradient exists, by hand, in fp32."""
    group = ParameterGroup("block 0", 100, 100, 100, 1, 0)
    early, late = (
        MemoryLevel(BatchCost(per_example=1000), 0.0),
        MemoryLevel(BatchCost(per_example=700), 1.0, is_head=True),
    )
    trace = Trace((group,), "samples", 1, levels=(early, late))
    alone = ParallelLayout(nodes=1, devices=1, micro_batch=1, single=True)
    assert predict_memory(trace, alone).activations + predict_memory(trace, alone).logits == 1100 - 400
    assert predict_memory(trace, alone).logits == 1100 - 1000
    for stays in (replace(alone, accumulate=2), replace(alone, devices=2, single=False)):
        assert (predict_memory(trace, stays).activations, predict_memory(trace, stays).logits) == (1000, 0)
