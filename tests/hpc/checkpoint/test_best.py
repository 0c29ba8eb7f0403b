"""Check that best.ckpt always links to a complete checkpoint, and that a resumed run still knows the best one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc.checkpoint import on_disk

pytestmark = pytest.mark.slow

WORDS = [
    "trainer=cpu",
    "callbacks.progress=null",
    "+trainer.enable_progress_bar=false",
    "+trainer.limit_train_batches=2",
    "+trainer.limit_val_batches=1",
    "+trainer.limit_test_batches=1",
    "+trainer.num_sanity_val_steps=0",
    "trainer.max_epochs=3",
    "checkpoint.keep=1",
]
# The values that validations return, and code to execute when the checkpoint of a step is published.
PATCH = """
import os
from hpc.checkpoint import on_disk as checkpoint
from hpc.resume.resume import Resume

LOSSES = {losses}
validated, publish = Resume.on_validation_end, checkpoint.publish

def on_validation_end(self, trainer, module):
    validated(self, trainer, module)
    self.run.validation_metrics["{metric}"] = LOSSES[trainer.current_epoch]

def named(part, final, *, files, details):
    if details["step"] == {step}:
        {happens}
    publish(part, final, files=files, details=details)

Resume.on_validation_end = on_validation_end
checkpoint.publish = named
"""
FULL = 'raise OSError(28, "No space left on device")'


def patch(losses: list[float], step: int | None = None, happens: str = "pass", metric: str = "val/loss") -> str:
    return PATCH.format(losses=losses, step=step, happens=happens, metric=metric)


def best(run_dir: Path) -> int:
    """Return the step of the best checkpoint, which must be complete."""
    found = on_disk.read_manifest(run_dir / "checkpoints" / "best.ckpt")
    assert found, f"best.ckpt leads to nothing: {os.listdir(run_dir / 'checkpoints')}"
    assert on_disk.find_flaw(found) == ""
    return found.step


def test_a_best_one_that_cannot_be_written_is_not_the_best(start: Callable, tmp_path: Path) -> None:
    words = [*WORDS, "checkpoint.every_n_steps=1"]  # the next save waits for the failed one and sees its error
    said = start(tmp_path / "run", 1, words, patch=patch([3.0, 1.0, 2.0], 4, FULL))
    assert "the checkpoint of step 4 was not written" in said
    assert best(tmp_path / "run") == 6  # better than the first, which stayed on the disk until then


def test_the_best_one_stays_while_its_successor_is_written(start: Callable, tmp_path: Path) -> None:
    """Kill the job just before the second best checkpoint is published. The link must still lead to the first one."""
    run_dir = tmp_path / "run"
    died = patch([3.0, 1.0, 2.0], 4, "os.kill(os.getpid(), 9)")
    start(run_dir, 1, [*WORDS, "checkpoint.every_n_steps=3"], patch=died, code=[-9])
    assert best(run_dir) == 2
    start(run_dir, 1, [], patch=patch([3.0, 4.0, 2.9]))  # again compared with the first
    assert best(run_dir) == 6


def test_a_run_that_died_before_it_named_the_best_names_it_when_it_goes_on(start: Callable, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    died = "checkpoint.set_link = lambda link, final: '-000000004-' in final.name and os.kill(os.getpid(), 9)"
    start(run_dir, 1, WORDS, patch=patch([3.0, 1.0, 2.0]) + died, code=[-9])
    start(run_dir, 1, [], 5, patch=patch([3.0, 1.0, 2.0]))
    assert best(run_dir) == 4


def test_a_best_one_that_is_gone_is_the_best_no_more(start: Callable, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start(run_dir, 1, WORDS, 3, patch=patch([1.0]))
    gone = (run_dir / "checkpoints" / "best.ckpt").resolve()
    gone.rename(tmp_path / "elsewhere")
    said = start(run_dir, 1, [], patch=patch([1.0, 3.0, 4.0]))
    assert "is gone" in said and best(run_dir) == 4


@pytest.mark.soak
def test_a_run_that_goes_on_with_another_metric_names_its_best_anew(start: Callable, tmp_path: Path) -> None:
    run_dir, accuracy = tmp_path / "run", patch([0.9, 0.5, 0.4], metric="val/accuracy")
    words = [word.replace("train_batches=2", "train_batches=3") for word in WORDS]
    start(run_dir, 1, words, 4, patch=patch([3.0]))
    said = start(run_dir, 1, ["checkpoint.monitor=train/loss"], code=2)  # before any step
    assert "must be a metric that is logged in validation (there are: val/accuracy, val/loss); got train/loss" in said
    assert "  monitor: val/loss\n" in (run_dir / "config.yaml").read_text()
    said = start(run_dir, 1, ["checkpoint.monitor=val/accuracy", "checkpoint.mode=max"], 5, patch=accuracy)
    note = "best.ckpt is the best one by val/loss (min); the next validation names a new one, by val/accuracy (max)"
    assert said.count(f"note: {note}\n") == 1 and best(run_dir) == 3  # until the next validation
    said = start(run_dir, 1, [], patch=accuracy)
    assert note not in said and best(run_dir) == 6


SAVES = """
import os
from my_research.module import Classifier

def on_train_epoch_end(self):
    for name in ("mine.ckpt", "epoch-%d.ckpt" % self.current_epoch):
        self.trainer.save_checkpoint("{folder}/" + name)
        assert os.path.exists("{folder}/" + name + "/manifest.json"), "it is not there yet"

Classifier.on_train_epoch_end = on_train_epoch_end
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_a_researcher_saves_leaves_all_beside_it_alone(
    start: Callable, ranks: int, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    others = [folder / "step-000000001-001", folder / "step-000000002-001"]
    for other in others:
        other.mkdir(parents=True)
        (other / "weights").write_text("somebody's")
    (folder / "last.ckpt").write_text("somebody's")
    words = WORDS if ranks == 1 else [*WORDS, "strategy=ddp", "trainer.devices=2"]
    start(tmp_path / "run", ranks, words, patch=SAVES.format(folder=folder))
    assert all((other / "weights").read_text() == "somebody's" for other in others)
    assert not (folder / "last.ckpt").is_symlink() and (folder / "last.ckpt").read_text() == "somebody's"
    saved = ["epoch-0.ckpt", "epoch-1.ckpt", "epoch-2.ckpt", "mine.ckpt"]
    assert set(os.listdir(folder)) == {*saved, "last.ckpt", *(other.name for other in others)}
    for name in saved:
        found = on_disk.read_manifest(folder / name)
        assert found and on_disk.find_flaw(found) == "", name
    assert best(tmp_path / "run") == 6
