"""Check a stop within a validation, a sanity check or a test: the interrupted part is redone."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_averaging import BATCH_NORM
from test_resume import COMMON, TYPED, assert_same
from tiers import soak_all_but

from hpc.resume.evaluation_stop import is_validation_next
from hpc.run import attempt_log

TINY = [*COMMON, "callbacks.monitor=null", "callbacks.samples=null", "callbacks.throughput=null"]
TINY += ["+trainer.limit_train_batches=4", "+trainer.limit_val_batches=5", "+trainer.limit_test_batches=4"]
TINY += ["trainer.max_epochs=2", "data.global_batch_size=32"]
ONE, TWO = ["trainer=cpu", *TINY], ["trainer=ddp", "trainer.devices=2", *TINY]
# Treat every validation as long. The warning comes at one batch; each batch that starts is written to a file.
STOP = """
import os, signal
from hpc.resume import evaluation_stop
from my_research.module import Classifier

evaluation_stop.LONG_SECONDS = 0.0
before = Classifier.HOOK

def hook(self, batch, batch_idx, *more):
    trainer = self.trainer
    if WHEN:
        with open(f"{trainer.default_root_dir}/batches", "a") as stream:
            stream.write(f"{batch_idx} ")
        if batch_idx == 1 and int(os.environ["RANK"] if "RANK" in os.environ else 0) == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR2)
    return before(self, batch, batch_idx, *more)

Classifier.HOOK = hook
"""
# The hook, the condition to stop in it, the number of ranks, the overrides, and the step of the resumed checkpoint.
PLACES = {
    "a sanity check": ("validation_step", "trainer.sanity_checking", 1, [*ONE, "+trainer.num_sanity_val_steps=-1"], 0),
    "a validation": ("validation_step", "trainer.global_step == 8", 1, ONE, 7),
    "a validation between two ranks": ("validation_step", "trainer.global_step == 8", 2, [*TWO, BATCH_NORM], 7),
    "a validation within a step": (
        "validation_step",
        "trainer.global_step == 2 and trainer.fit_loop.epoch_loop.batch_progress.current.ready == 1",
        1,
        [*ONE, "trainer.accumulate_grad_batches=2", "+trainer.val_check_interval=1"],
        2,
    ),
    "a test": ("test_step", "True", 1, ONE, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", soak_all_but(PLACES, "a validation"))
def test_a_stop_is_obeyed_at_the_next_batch_and_the_whole_is_done_again(
    place: str, start: Callable, tmp_path: Path
) -> None:
    hook, when, ranks, words, step = PLACES[place]
    stop = STOP.replace("HOOK", hook).replace("WHEN", when)
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    start(run_dir, ranks, words, patch=TYPED + stop, code=85)
    assert f"step {step}\noutcome continue\nwhy SIGUSR2" in (run_dir / "verdict").read_text()
    batches = (run_dir / "batches").read_text().split()
    assert sorted(batches) == sorted([*"01"] * ranks)
    start(run_dir, ranks, [])
    start(reference, ranks, words, patch=TYPED)
    assert_same(run_dir, reference)
    mine, its = (
        [event for event in attempt_log.read_events(path) if event["event"] == "end"] for path in (run_dir, reference)
    )
    assert mine[-1]["metrics"] == its[-1]["metrics"] != {}
    best = [(path / "checkpoints" / "best.ckpt").resolve().name[:14] for path in (run_dir, reference)]
    assert best[0] == best[1]


def trainer(every: float | None, accumulate: int, spans_epochs: bool = False, **at: Any) -> Any:
    loop = SimpleNamespace(_should_check_val_epoch=lambda: at.get("checks", True), batch_idx=at["batch"])
    loop.total_batch_idx, loop.batch_progress = at.get("total", at["batch"]), SimpleNamespace(is_last_batch=False)
    facts = {"accumulate_grad_batches": accumulate, "val_check_batch": every, "num_training_batches": 10}
    return SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=loop), check_val_every_n_epoch=None if spans_epochs else 1, **facts
    )


@pytest.mark.parametrize(
    ("now", "follows"),
    [
        (trainer(4, 1, batch=3), True),
        (trainer(4, 1, batch=4), False),
        (trainer(4, 1, batch=2), False),
        (trainer(3, 4, batch=0), True),  # within the step
        (trainer(9, 4, batch=4), False),
        (trainer(9, 4, batch=8), True),
        (trainer(1, 1, batch=0), True),
        (trainer(7, 1, True, batch=3, total=13), True),
        (trainer(7, 1, True, batch=6, total=16), False),
        (trainer(12, 4, True, batch=8, total=8), False),  # the epoch ends with a step of two batches
        (trainer(12, 4, True, batch=0, total=10), True),
        (trainer(10, 1, batch=9, checks=False), False),
        (trainer(float("inf"), 2, batch=8), True),
        (trainer(float("inf"), 2, batch=6), False),
    ],
)
def test_a_validation_is_foreseen(now: Any, follows: bool) -> None:
    assert is_validation_next(now) is follows
