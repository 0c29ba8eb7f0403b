"""Real runs on two processes, stopped and resumed, or loaded into Python, compared with uninterrupted ones."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from choices import EXPERIMENTS, compose, compose_small_or_skip
from conftest import command
from hpc.checkpoint.trained import load
from hpc.config.errors import ConfigError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

pytestmark = pytest.mark.slow

CPU = ["cluster=local", "trainer=cpu", "trainer.precision=32-true"]
STEPS = ["trainer.max_steps=10", "++trainer.limit_val_batches=0", "++trainer.limit_test_batches=1"]
LAST = "checkpoint.monitor=null"  # so that `load` reads the last weights, not the best ones
STRATEGIES = ["ddp", "fsdp", "tensor_parallel", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"]
# The default experiment runs with all strategies but tensor_parallel, for which its network has no plan; the others run
# with the two strategies that depend on the network.
CASES = [(EXPERIMENTS[0], strategy) for strategy in STRATEGIES if strategy != "tensor_parallel"]
CASES += [(experiment, strategy) for experiment in EXPERIMENTS[1:] for strategy in ("fsdp", "tensor_parallel")]


def weights(run_dir: Path) -> dict[str, Tensor]:
    return load(run_dir)[0].state_dict()


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of each step, as TensorBoard shows it."""
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars("step/loss")]


@pytest.mark.parametrize(("experiment", "strategy"), CASES)
def test_two_processes_learn_what_one_does(experiment: str, strategy: str, train: Callable) -> None:
    compose_small_or_skip(experiment)  # only to skip
    two = [f"strategy={strategy}", "trainer.devices=2"]
    skip_if_the_network_is_rejected(experiment, *CPU, *two)
    alone, _ = train(experiment, *CPU, *STEPS, LAST)
    together, _ = train(experiment, *CPU, *STEPS, LAST, *two)
    torch.testing.assert_close(weights(together), weights(alone), atol=1e-4, rtol=0)


def skip_if_the_network_is_rejected(*words: str) -> None:
    """Skip the test if the network lacks what the strategy needs (`blocks` or `tensor_parallel_plan`)."""
    try:
        compose(*words)
    except ConfigError as error:
        if error.key == "model.network":
            pytest.skip(str(error).splitlines()[0])
        raise


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("fsdp", 2)])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    strategy: str, devices: int, train: Callable, tmp_path: Path
) -> None:
    words = [*CPU, f"strategy={strategy}", f"trainer.devices={devices}", "trainer.max_steps=150", LAST]
    words += ["checkpoint.every_n_steps=5", "trainer.log_every_n_steps=1", "++trainer.limit_test_batches=1"]
    run_dir = tmp_path / "run"
    run = subprocess.Popen(command(*words, f"run_dir='{run_dir}'"), start_new_session=True)
    try:
        while not (run_dir / "checkpoints" / "last.ckpt").exists():
            assert run.poll() is None, "it ended before it could be stopped"
            time.sleep(0.02)
        os.killpg(run.pid, signal.SIGUSR2)  # to all processes, as Slurm does before the time limit
        run.wait(timeout=120)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert "outcome continue" in (run_dir / "verdict").read_text()

    subprocess.run(command(f"resume={run_dir}"), check=True)
    whole, _ = train(*words)
    assert losses(run_dir) == losses(whole), "each step is done once"
    torch.testing.assert_close(weights(run_dir), weights(whole), atol=0, rtol=0)


def test_a_run_that_is_loaded_predicts_as_it_did(train: Callable) -> None:
    run_dir, metrics = train(*CPU, *STEPS, LAST)
    module, data = load(run_dir)
    trainer = L.Trainer(accelerator="cpu", logger=False, limit_test_batches=1)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    assert tested == pytest.approx(metrics, abs=1e-4) and tested
