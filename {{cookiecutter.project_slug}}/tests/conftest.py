"""Fixtures of all tests: a clean environment, and training in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

os.environ["XDG_CONFIG_HOME"] = os.devnull  # before hpc is imported: your own accounts are not part of a test
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is: two processes share this machine

from hpc.submit.scheduler import LEAKED_VARIABLES

for name in filter(LEAKED_VARIABLES.match, list(os.environ)):  # variables of a surrounding job: no test is a part of it
    del os.environ[name]

PROJECT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, float]]]:
    """Return a function that runs `python train.py` with overrides, and returns the run directory and test metrics.

    Called again with the same overrides, it returns the same run.
    """

    @cache
    def train(*words: str) -> tuple[Path, dict[str, float]]:
        run_dir = tmp_path_factory.mktemp("run") / "run"
        done = subprocess.run(command(*words, f"run_dir='{run_dir}'"), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("test/")]
        return run_dir, {name: float(value) for name, value in lines}

    return train


def command(*words: str, program: str = "train.py") -> list[str]:
    return [sys.executable, str(PROJECT / program), *words]
