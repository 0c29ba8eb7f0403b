"""The module learns: one batch by heart, and the default experiment to a given accuracy."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
from choices import EXPERIMENTS, compose_small_or_skip, load_batches
from hpc.config.build import build
from torch.utils.data import DataLoader

METRIC, BOUND = "test/accuracy", 0.8  # of the default experiment after five epochs


class StopWhenLearned(L.Callback):
    """Stops the training as soon as its loss is a twentieth of the first one."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        trainer.should_stop = self.losses[-1] < self.losses[0] / 20


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_one_batch_is_learned_by_heart(experiment: str) -> None:
    cfg = compose_small_or_skip(experiment)
    (batch,) = load_batches(cfg, "train", 1)
    learned = StopWhenLearned()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", max_steps=300, callbacks=[learned], enable_model_summary=False, **quiet)
    trainer.fit(build(cfg.model), DataLoader([batch] * trainer.max_steps, batch_size=None))
    assert trainer.should_stop, f"the loss went from {learned.losses[0]:.3g} to {learned.losses[-1]:.3g}"


@pytest.mark.parametrize("trainer", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_default_experiment_learns(trainer: str, train: Callable) -> None:
    _, metrics = train(f"trainer={trainer}", "trainer.max_epochs=5")
    assert metrics[METRIC] > BOUND
