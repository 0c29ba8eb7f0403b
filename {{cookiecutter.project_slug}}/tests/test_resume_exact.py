"""What Lightning can do besides is gone on with exactly, too: each run is compared with one that was never stopped."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_resume import COMMON, TYPED, assert_same, scalars

pytestmark = pytest.mark.slow

LIMITS = ["+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1"]
WORDS = [*COMMON, *LIMITS, "trainer=cpu", "trainer.max_epochs=2"]
TWO_SCHEDULES = """
import torch
from {{ cookiecutter.package_name }}.module import Classifier

def configure_optimizers(self):
    optimizer = self.make_optimizer(self.parameters())
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=12)
    decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    return [optimizer], [{"scheduler": warm, "interval": "step", "frequency": 2}, {"scheduler": decay}]

Classifier.configure_optimizers = configure_optimizers
"""
ACCUMULATE = "+callbacks.accumulate._target_=lightning.pytorch.callbacks.GradientAccumulationScheduler"
# Words, code, and the steps that are done when it is stopped.
CASES: dict[str, tuple[list[str], str, list[int]]] = {
    "an epoch that ends with an incomplete step": (
        ["+trainer.limit_train_batches=10", "trainer.accumulate_grad_batches=3", "data.global_batch_size=48"],
        "",
        [2, 4, 6],
    ),
    "other micro-batches in each epoch": (
        ["+trainer.limit_train_batches=7", ACCUMULATE, "+callbacks.accumulate.scheduling={0:2,1:3}"],
        TYPED + TWO_SCHEDULES,
        [2, 4, 5],
    ),
    "two schedules of one optimizer": (["data.global_batch_size=128"], TWO_SCHEDULES, [5, 12]),
}


def stopped(start: Callable, run_dir: Path, words: Sequence[str], stops: Sequence[int], patch: str = "") -> None:
    for step in [*stops, None]:
        start(run_dir, 1, [] if run_dir.exists() else words, step, patch)


@pytest.mark.parametrize("what", CASES)
def test_a_run_that_is_stopped_ends_as_one_that_is_not(what: str, start: Callable, tmp_path: Path) -> None:
    words, patch, stops = CASES[what]
    start(tmp_path / "reference", 1, [*WORDS, *words], patch=patch)
    stopped(start, tmp_path / "run", [*WORDS, *words], stops, patch)
    assert_same(tmp_path / "run", tmp_path / "reference")
    points = scalars(tmp_path / "run")["train/loss"]
    assert [step for step, _ in points] == list(range(len(points)))


@pytest.mark.parametrize("steps", [6, 9])
def test_a_run_of_so_many_steps_goes_on_where_it_ended(steps: int, start: Callable, tmp_path: Path) -> None:
    """In the middle of an epoch of nine steps, or where one ends."""
    words = [*WORDS, "data.global_batch_size=128"]
    start(tmp_path / "reference", 1, [*words, "trainer.max_steps=12"], patch=TWO_SCHEDULES)
    start(tmp_path / "run", 1, [*words, f"trainer.max_steps={steps}"], patch=TWO_SCHEDULES)
    start(tmp_path / "run", 1, ["trainer.max_steps=12"], patch=TWO_SCHEDULES)
    assert_same(tmp_path / "run", tmp_path / "reference")
