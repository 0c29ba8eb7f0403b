"""Test a few rounds of concurrent use, one of them of the day. `make neighbours` runs more rounds."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
HARMS = [
    "changed a file of another",
    "deleted a file of another",
    "does not end",
    "ended a process of another",
    "ended otherwise",
    "executed",
    "left a file",
    "left a process",
    "written outside",
]


def run(*words: str | Path, seconds: float) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


@pytest.mark.soak
def test_neighbours_do_no_harm_and_without_the_cures_they_do(project):
    words = ["neighbours", "--count", "3", "--day", "1", "--controls", "--project", project]
    said = run(HERE / "trial", *words, seconds=900)
    assert "4 rounds: 4 right" in said
    assert said.count(": harmed, as it must be") == 3


@pytest.mark.slow
def test_every_harm_is_seen(tmp_path):
    """Check that a ground tells each harm: a program does them all."""
    said = run(HERE / "trial" / "modules" / "harmful.py", HERE, tmp_path / "ground", seconds=120)
    assert said.splitlines() == HARMS
