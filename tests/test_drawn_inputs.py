"""Test some random hostile input, some of it of the day. `make hostile COUNT=5000 SEED=1` draws more."""

import subprocess
import sys
from pathlib import Path

import pytest
from trial.hostile import WRONG

pytestmark = pytest.mark.soak


def test_hostile_input_is_right_or_one_sentence_and_what_is_wrong_is_found(project):
    """Check also that the trial detects each kind of failure: otherwise its success would prove nothing."""
    words = ["hostile", "--count", "200", "--day", "40", "--controls", "--project", project]
    command = [sys.executable, Path(__file__).with_name("trial"), *words]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert done.stdout.count(", as it must be") == len(WRONG)
