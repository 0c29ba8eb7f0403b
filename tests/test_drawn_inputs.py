"""Test some random hostile input. `make hostile COUNT=5000 SEED=1` draws more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak

DRAWN = Path(__file__).with_name("drawn_inputs.py")
# Possible faults of a program, by the number of the case.
WRONG = """
import os, sys, time, hostile_programs
deeds = {
    0: lambda: 1 / 0,
    1: lambda: sys.exit(3),
    2: lambda: time.sleep(60),
    3: lambda: (folder / "canary").touch(),
    4: lambda: (folder / "victim").write_text("spoilt"),
    5: lambda: print("\\x1b]0;owned\\x07"),
    6: lambda: sys.exit(2),
}
hostile_programs.enter = lambda *_: deeds[number]()
"""
FOUND = ["traceback", "exit code", "hung", "executed", "written outside", "escape code", "no sentence"]


def drawn(project, *words):
    command = [sys.executable, str(DRAWN), "--project", str(project), *words]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600)


def test_what_is_wrong_is_found(bake):
    """Check that the search detects each kind of failure: otherwise its success would prove nothing."""
    done = drawn(
        bake(), "--count", str(len(FOUND)), "--patience", "12", "--kind", "personal clusters.yaml", "--patch", WRONG
    )
    assert done.returncode == 1
    assert re.findall(r"(?m)^\d+ personal clusters.yaml: (.*)$", done.stdout) == FOUND, done.stdout + done.stderr


def test_hostile_input_is_right_or_one_sentence(bake):
    done = drawn(bake(), "--count", "200", "--seconds", "40")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
