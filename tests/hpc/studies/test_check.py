"""Check what tools/check.py says of runs that end with other weights, and of one that stands still."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hpc.checkpoint import weights
from hpc.studies import check

WEIGHTS = {"exact": 1.0, "exact-ddp": 1.0 + 1e-12, "exact-fsdp": 1.0}


def compared(given: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> bool:
    """Return whether the comparison of runs that end with these weights fails."""

    def read(path: Path) -> dict[str, Any]:
        return {"bias": torch.zeros(1), "weight": torch.full((2,), given[path.parents[1].name], dtype=torch.float64)}

    monkeypatch.setattr(weights, "read", read)
    checked = check.Check([], tmp_path)
    monkeypatch.setattr(checked, "train", lambda *arguments, **options: True)
    checked.compare()
    return checked.has_failed


def test_sums_in_another_order_are_the_same_weights(monkeypatch, tmp_path, capsys) -> None:
    assert not compared(WEIGHTS, monkeypatch, tmp_path)
    assert capsys.readouterr().out == "works  the same weights with ddp and with fsdp, in float64 (0 s)\n"


def test_other_weights_with_fsdp_fail(monkeypatch, tmp_path, capsys) -> None:
    assert compared(WEIGHTS | {"exact-fsdp": 1.1}, monkeypatch, tmp_path)
    assert "with fsdp it ends with other weights than with ddp: weight\n" in capsys.readouterr().out


def test_other_weights_on_one_process_are_noted(monkeypatch, tmp_path, capsys) -> None:
    assert not compared(WEIGHTS | {"exact": 1.1}, monkeypatch, tmp_path)
    assert "note: two processes end with other weights than one: weight: right where" in capsys.readouterr().out


def test_a_run_that_stands_still_is_told_with_the_line(tmp_path) -> None:
    output = "epoch 0\nrank 1 on node: Hang: no step for 120 s since the start; stuck in mine.py:7 step\nThread Main\n"
    assert check._why(tmp_path / "none", output).endswith("stuck in mine.py:7 step")
