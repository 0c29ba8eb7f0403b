"""Check that the rarer layouts train as one process does, and that a run of them that is stopped goes on exactly."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fork import QUIET, scalars

pytestmark = [pytest.mark.slow, pytest.mark.soak]

STEPS = 6
TEXT = [
    "experiment=text",
    "model.network.width=32",
    "model.network.num_layers=2",
    "model.warmup_steps=1",
    "model.optimizer.lr=0.02",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.precision=32-true",
    "trainer.accelerator=cpu",
    "+trainer.limit_val_batches=0",
    "+trainer.limit_test_batches=1",
    "trainer.val_check_interval=1000",
    "checkpoint.monitor=null",
    QUIET,
]
LAYOUTS = {
    "tensor_parallel": (2, ["strategy=tensor_parallel"]),
    "fsdp with tensor parallelism": (4, ["strategy=fsdp", "strategy.tensor_parallel_size=2"]),
    "zero3_offload": (2, ["strategy=zero3_offload"]),
}


@pytest.fixture(scope="module")
def alone(start: Callable, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of one process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    start(run_dir, 1, TEXT)
    return scalars(run_dir, "step/loss")


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_follows_one_process_also_where_it_was_stopped(
    name: str, start: Callable, alone: list[float], tmp_path: Path
) -> None:
    ranks, layout = LAYOUTS[name]
    words = [*TEXT, *layout, f"trainer.devices={ranks}"]
    start(tmp_path / "whole", ranks, words)
    start(tmp_path / "stopped", ranks, words, stop_at=3)
    start(tmp_path / "stopped", ranks, [])
    whole, stopped = (scalars(tmp_path / run, "step/loss") for run in ("whole", "stopped"))
    assert whole == pytest.approx(alone, abs=1e-4) and len(alone) == STEPS and alone[-1] < alone[0] - 0.1
    assert stopped == whole, "the first three losses, and those after the stop"


@pytest.mark.parametrize(("first", "then"), [("tensor_parallel", "ddp"), ("ddp", "tensor_parallel")])
def test_weights_and_optimizer_states_move_to_tensor_parallel_ranks_and_from_them(
    first: str, then: str, start: Callable, alone: list[float], tmp_path: Path
) -> None:
    start(tmp_path / "run", 2, [*TEXT, f"strategy={first}", "trainer.devices=2"], stop_at=3)
    start(tmp_path / "run", 2, [f"strategy={then}"])
    assert scalars(tmp_path / "run", "step/loss") == pytest.approx(alone, abs=1e-4) and len(alone) == STEPS
