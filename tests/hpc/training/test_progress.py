"""Check that a pipe gets lines, and that warnings which a user can do nothing about are not shown."""

import io
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from torch.utils._pytree import LeafSpec

from hpc.training import progress
from hpc.training.progress import LIBRARIES_WARNINGS, is_no_advertisement


class Logs(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", torch.tensor(0.5), prog_bar=True)
        return super().training_step(batch, batch_idx)


def lines_of(bar: Any, folder: Path, capsys: pytest.CaptureFixture) -> list[str]:
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    trainer = L.Trainer(
        max_epochs=2, limit_train_batches=3, limit_val_batches=2, callbacks=[bar], accelerator="cpu",
        default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(Logs())
    trainer.test(Logs(), verbose=False)
    out = capsys.readouterr().out
    assert "\r" not in out
    return [line for line in out.splitlines() if line.startswith(("train:", "validation:", "test:"))]


def test_a_pipe_gets_a_line_per_epoch(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bar = progress.progress_bar(10)
    assert lines_of(bar, tmp_path, capsys) == [f"train: epoch {n}, step {3 * n + 3}, loss 0.5" for n in (0, 1)]


def test_whatever_takes_longer_gets_a_line_per_minute(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lines = lines_of(progress.ProgressLines(every_seconds=0.0), tmp_path, capsys)
    assert [line for line in lines if line.startswith("train: epoch 1")] == [
        f"train: epoch 1, step {step}, loss 0.5" for step in (4, 5, 6, 6)
    ]
    assert {"validation: 2 batches", "test: 64 batches"} <= set(lines)


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture) -> None:
    bar = progress.ProgressLines()
    bar.disable()
    bar._print("x")
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    bar = progress.progress_bar(7)
    assert isinstance(bar, TQDMProgressBar) and bar.refresh_rate == 7


def test_warnings_of_libraries_are_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provoke two of them: a new wording would show them again."""
    from lightning.fabric.plugins.environments import slurm

    monkeypatch.setattr(slurm.shutil, "which", lambda name: "/usr/bin/srun")
    monkeypatch.setattr(slurm, "_is_slurm_interactive_mode", lambda: False)
    for name in ("SLURM_NTASKS", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        slurm.SLURMEnvironment._validate_srun_used()
        isinstance(LeafSpec(), LeafSpec)
        assert len(shown) == 2
        for message in LIBRARIES_WARNINGS:
            warnings.filterwarnings("ignore", message)
        slurm.SLURMEnvironment._validate_srun_used()
        isinstance(LeafSpec(), LeafSpec)
    assert len(shown) == 2


def test_advertisements_are_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    options: dict[str, Any] = {"logger": CSVLogger(tmp_path), "accelerator": "cpu", "enable_progress_bar": False}
    with caplog.at_level(logging.INFO, logger.name):
        L.Trainer(**options)
        assert "litlogger" in caplog.text  # a new wording would show it again
        caplog.clear()
        logger.addFilter(is_no_advertisement)
        L.Trainer(**options)
        logger.removeFilter(is_no_advertisement)
    assert "GPU available" in caplog.text and "litlogger" not in caplog.text
