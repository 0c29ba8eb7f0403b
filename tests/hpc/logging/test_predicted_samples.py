"""Check the pictures and text of logged predictions."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from hpc.logging.predicted_samples import (
    LINE_PIXELS,
    TILE_PIXELS,
    PredictedSamples,
    contact_sheet,
    sample_kind,
    text_table,
    tokens_to_text,
)


def test_a_contact_sheet_marks_wrong_predictions_in_red() -> None:
    sheet = contact_sheet(torch.rand(3, 1, 8, 8), predicted=[3, 4, 5], truth=[3, 5, 5], columns=2)
    assert sheet.shape == (2 * (TILE_PIXELS + LINE_PIXELS), 2 * TILE_PIXELS, 3)
    red = (sheet[..., 0] > 200) & (sheet[..., 1] < 100)
    assert not red[:, :TILE_PIXELS].any() and red[: TILE_PIXELS + LINE_PIXELS, TILE_PIXELS:].any()


def test_bytes_are_shown_as_text_and_tokens_as_numbers() -> None:
    assert tokens_to_text(torch.tensor(list(b"def f():\n"))) == "def f():·"
    assert tokens_to_text(torch.tensor([1000, 2])) == "1000 2"
    table = text_table(torch.tensor([list(b"abd")]), torch.tensor([list(b"abc")]))
    assert table == "    truth      abc\n    predicted  abd"


@pytest.mark.parametrize(
    "batch",
    [
        {"inputs": torch.ones(2, 3)},
        (),
        [torch.ones(2, 3)],
        (torch.tensor(1.0),) * 2,
        torch.ones(2, 3),
        ("a", "b"),
        (torch.ones(2, 1, 4, 4), torch.ones(2)),
        (torch.ones(2, 3), torch.ones(2, 3)),
    ],  # regressions
)
def test_a_batch_that_is_no_pair_cannot_be_shown(batch: Any) -> None:
    assert sample_kind(batch) == ""


class Draws(L.LightningModule):
    """A module that counts its calls and draws a random number in each; `makes` computes the output of forward."""

    def __init__(self, makes: Any) -> None:
        super().__init__()
        self.makes, self.calls, self.drawn = makes, 0, []

    def forward(self, inputs: torch.Tensor) -> Any:
        self.calls += 1
        return self.makes(inputs)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])
        self.drawn.append(torch.rand(()).item())


@pytest.mark.parametrize(
    ("makes", "pictures"),
    [
        (lambda inputs: torch.rand(len(inputs), 5), 1),
        (lambda inputs: (inputs, torch.rand(len(inputs), 5)), 0),  # an autoencoder
        (lambda inputs: torch.rand(len(inputs), 5, 8, 8), 0),  # segmentation
    ],
)
def test_the_modules_forward_is_not_called_for_a_picture(makes: Any, pictures: int, tmp_path: Path) -> None:
    images: Any = [(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))] * 2
    seen = []
    for number in (0, 1):
        torch.manual_seed(1)
        module = Draws(makes)
        callbacks: list[L.Callback] = [PredictedSamples(3)] * number
        logger = TensorBoardLogger(tmp_path, version=number)
        trainer = L.Trainer(
            accelerator="cpu", callbacks=callbacks, logger=logger, enable_progress_bar=False, enable_checkpointing=False
        )
        trainer.validate(module, DataLoader(images, batch_size=None), verbose=False)
        seen.append((module.calls, module.drawn))
    assert seen[0] == seen[1]
    logger.experiment.flush()
    tags = EventAccumulator(str(logger.log_dir)).Reload().Tags()["images"]
    assert tags == ["val/samples"] * pictures and not module._forward_hooks
