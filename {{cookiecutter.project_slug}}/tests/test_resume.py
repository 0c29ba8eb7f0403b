"""A run that is stopped and goes on ends as one that was never stopped: bit for bit."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ENVIRON, PROJECT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from {{ cookiecutter.package_name }}.hpc import weights

pytestmark = pytest.mark.slow

STEPS, CONTINUE = 57, 85  # three epochs of 19 steps; the exit code of a rank that is to go on
COMMON = [
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "trainer.log_every_n_steps=1",
    "trainer.max_epochs=3",
    "trainer.accumulate_grad_batches=2",
    "+trainer.enable_progress_bar=false",
    "callbacks.progress=null",
]
STRATEGIES = {
    "single": (1, ["trainer=cpu"]),
    "ddp": (4, ["trainer=ddp"]),
    "fsdp": (4, ["trainer=fsdp"]),
    "deepspeed": (4, ["trainer=deepspeed"]),
}
# Dropout, and the text of Python's own library: few windows of it, as an epoch is all of them.
DROPOUT = [
    "trainer=cpu",
    "experiment=text",
    "model.network.dropout=0.1",
    "model.network.width=32",
    "trainer.max_steps=20",
    "trainer.val_check_interval=1000",
    "+trainer.limit_val_batches=0",
    "+trainer.limit_test_batches=1",
    "checkpoint.monitor=null",
]


def runs(folder: Path, plan: list[dict[str, Any]]) -> list[list[int]]:
    """The exit codes of all ranks of all starts."""
    log = folder / "ranks.log"
    command = [sys.executable, str(PROJECT / "tests" / "ranks.py"), json.dumps(plan), str(log)]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    unexpected = any(code not in (0, CONTINUE) for start in codes for code in start)
    assert not unexpected, f"{codes}\n{log.read_text()[-5000:]}"
    return codes


def scalars(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Every scalar that TensorBoard shows, but for what depends on time and hardware."""
    board = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    tags = [tag for tag in board.Tags()["scalars"] if not tag.startswith(("perf/", "node/"))]
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in tags}


def state(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights and, where they lie in a folder of torch's, the optimizer's states, of the last checkpoint."""
    last = run_dir / "checkpoints" / "last.ckpt"
    found = {f"weights {name}": value for name, value in weights.read(last).items()}
    if (last / ".metadata").exists():
        kept, weights.PREFIX = weights.PREFIX, "optimizer_0.state."
        try:
            found |= {f"optimizer {name}": value for name, value in weights.read(last).items()}
        finally:
            weights.PREFIX = kept
    return found


def assert_same(run_dir: Path, reference: Path) -> None:
    mine, its = state(run_dir), state(reference)
    assert mine.keys() == its.keys()
    assert not [name for name in its if not torch.equal(mine[name], its[name])]
    assert scalars(run_dir) == scalars(reference)


def stopped(folder: Path, ranks: int, words: list[str], stops: list[int], patch: str = "") -> tuple[Path, Path]:
    """The directories of a run that was stopped in these steps, and of one that was not."""
    reference, run_dir = folder / "reference", folder / "stopped"
    plan: list[dict[str, Any]] = [{"words": [*words, f"run_dir={reference}"], "ranks": ranks, "patch": patch}]
    for number, step in enumerate([*stops, None]):
        again = [f"resume={run_dir}"] if number else [*words, f"run_dir={run_dir}"]
        plan.append({"words": again, "ranks": ranks, "stop_at": step, "patch": patch})
    codes = runs(folder, plan)
    assert codes == [[0] * ranks, *[[CONTINUE] * ranks] * len(stops), [0] * ranks]
    return run_dir, reference


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_is_stopped_ends_as_one_that_is_not(strategy: str, tmp_path: Path) -> None:
    ranks, words = STRATEGIES[strategy]
    seed = random.randrange(1000)
    print("seed", seed)  # shown where the test fails
    stops = sorted(random.Random(seed).sample(range(2, STEPS - 3), 3))
    run_dir, reference = stopped(tmp_path, ranks, [*words, *COMMON, f"trainer.devices={ranks}"], stops)
    assert_same(run_dir, reference)
    assert [step for step, _ in scalars(run_dir)["train/loss"]] == list(range(STEPS))  # no gap, none twice


def test_a_run_with_dropout_goes_on_with_the_same_random_numbers(tmp_path: Path) -> None:
    assert_same(*stopped(tmp_path, 1, [*DROPOUT, *COMMON[1:3], *COMMON[5:]], [5]))


LEFT_OUT = {
    "random numbers": "from {{ cookiecutter.package_name }}.hpc import randomness; randomness.restore = lambda state: None",
    "position": "from {{ cookiecutter.package_name }}.hpc import resume; resume.start_at = lambda trainer, start: None",
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_is_left_out_of_a_checkpoint_is_missed(what: str, tmp_path: Path) -> None:
    """A comparison that could not fail would prove nothing."""
    words = [*DROPOUT, *COMMON[1:3], *COMMON[5:]]
    run_dir, reference = stopped(tmp_path, 1, words, [5], LEFT_OUT[what])
    with pytest.raises(AssertionError):
        assert_same(run_dir, reference)
