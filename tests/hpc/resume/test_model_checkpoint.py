"""Check that Lightning's ModelCheckpoint saves where it says, and that it changes nothing about resuming."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from test_resume import COMMON, assert_same

from hpc.checkpoint import export, on_disk
from hpc.config.errors import ConfigError
from hpc.resume import unsupported

WORDS = [*COMMON, "+trainer.limit_val_batches=1", "+trainer.limit_test_batches=1", "+trainer.limit_train_batches=4"]
WORDS += ["trainer=cpu", "trainer.max_epochs=3", "checkpoint.monitor=null"]
# As its documentation writes it; the module's own configure_callbacks adds another one.
PATCH = """
from lightning.pytorch.callbacks import ModelCheckpoint
from my_research.module import Classifier

def configure_callbacks(self):
    return [
        ModelCheckpoint(monitor="val/loss", mode="min", save_top_k=2, save_last=True, filename="{epoch}-{step}"),
        ModelCheckpoint(dirpath="FOLDER", every_n_train_steps=5, save_top_k=-1, save_weights_only=True),
    ]

Classifier.configure_callbacks = configure_callbacks
"""


@pytest.mark.slow
def test_it_saves_where_it_says_and_the_run_resumes_exactly(start: Callable, tmp_path: Path) -> None:
    names = {}
    for name, stop in (("reference", None), ("run", 6)):
        run_dir, mine = tmp_path / name, tmp_path / f"{name}-mine"
        patch = PATCH.replace("FOLDER", str(mine))
        said = start(run_dir, 1, WORDS, stop, patch)
        assert said.count(f"note: ModelCheckpoint saves in {run_dir}/model_checkpoints\n") == 1
        if stop:
            start(run_dir, 1, [], None, patch)
        kept = sorted(path.name for path in (run_dir / "model_checkpoints").iterdir())
        assert (
            len(kept) == 3 and "last.ckpt" in kept and all(map(has_manifest, (run_dir / "model_checkpoints").iterdir()))
        )
        assert sorted(on_disk.read_manifest(path).step for path in mine.iterdir()) == [5, 10]  # type: ignore[union-attr]
        names[name] = kept
    assert names["run"] == names["reference"]
    assert_same(tmp_path / "run", tmp_path / "reference")
    checkpoint, _ = export.export(next(mine.iterdir()), tmp_path / "w.safetensors")
    assert checkpoint.parent == mine
    shutil.rmtree(run_dir / "model_checkpoints")
    assert on_disk.read_manifest(run_dir / "checkpoints" / "last.ckpt").step == 12  # type: ignore[union-attr]


def has_manifest(path: Path) -> bool:
    return on_disk.read_manifest(path) is not None


@pytest.mark.parametrize(
    ("options", "rule"),
    [({"dirpath": "RUN/checkpoints"}, "must not be that of"), ({"save_on_exception": True}, "must not be followed by")],
)
def test_what_would_harm_the_run_is_rejected(options: dict[str, Any], rule: str, tmp_path: Path) -> None:
    options = {key: tmp_path / "checkpoints" if key == "dirpath" else value for key, value in options.items()}
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[ModelCheckpoint(**options)])
    with pytest.raises(ConfigError, match=rule):
        unsupported.check_model_checkpoints(trainer, tmp_path)


@pytest.mark.parametrize("key", ["best_k_models", "last_model_path", "kth_best_model_path"])
def test_a_forged_path_is_not_removed(key: str) -> None:
    path = "/run/model_checkpoints/../../home"
    forged = {key: {path: 1.0} if key == "best_k_models" else path}
    with pytest.raises(ConfigError, match=r"without `\.\.`"):
        unsupported.reject_paths_outside({"callbacks": {"ModelCheckpoint{'monitor': None}": forged}})
