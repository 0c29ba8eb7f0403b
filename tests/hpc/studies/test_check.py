"""Check what tools/check.py says of a run that stands still."""

from pathlib import Path

from hpc.studies import check


def test_a_run_that_stands_still_is_told_with_the_line(tmp_path: Path) -> None:
    output = "epoch 0\nrank 1 on node: Hang: no step for 120 s since the start; stuck in mine.py:7 step\nThread Main\n"
    assert check._why(tmp_path / "none", output).endswith("stuck in mine.py:7 step")
