"""Pictures and lines of predictions are what they claim to be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from {{ cookiecutter.package_name }}.samples import LINE, TILE, Samples, contact_sheet, readable, text_table


def test_a_contact_sheet_marks_wrong_predictions_in_red() -> None:
    sheet = contact_sheet(torch.rand(3, 1, 8, 8), [3, 4, 5], [3, 5, 5], columns=2)
    assert sheet.shape == (2 * (TILE + LINE), 2 * TILE, 3)
    red = (sheet[..., 0] > 200) & (sheet[..., 1] < 100)
    assert not red[:, :TILE].any() and red[: TILE + LINE, TILE:].any()


def test_bytes_are_shown_as_text_and_tokens_as_numbers() -> None:
    assert readable(torch.tensor(list(b"def f():\n"))) == "def f():·"
    assert readable(torch.tensor([1000, 2])) == "1000 2"
    table = text_table(torch.tensor([list(b"abd")]), torch.tensor([list(b"abc")]))
    assert table == "    truth      abc\n    predicted  abd"


@pytest.mark.parametrize(
    "batch",
    [{"inputs": torch.ones(2, 3)}, (), [torch.ones(2, 3)], (torch.tensor(1.0),) * 2, torch.ones(2, 3), ("a", "b")],
)
def test_of_a_batch_that_is_no_pair_nothing_is_shown(batch: Any) -> None:
    trainer: Any = SimpleNamespace(sanity_checking=False)
    Samples().on_validation_batch_end(trainer, None, None, batch, 0)  # type: ignore[arg-type]
