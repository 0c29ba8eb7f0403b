"""What several tests share: the shipped configs, shrunk, and real runs in processes of their own."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["XDG_CONFIG_HOME"] = os.devnull  # before the package is imported: this user's own accounts stay out of it

from desk import desk as desk

from {{ cookiecutter.package_name }}.hpc.scheduler import LEAKS

PROJECT = Path(__file__).resolve().parents[1]
# Only names of this environment's own making: a test behaves alike inside a job and on a laptop.
ENVIRON = {k: v for k, v in os.environ.items() if not LEAKS.match(k)}
QUIET = "callbacks.progress.refresh_rate=0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def call() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python train.py ...` as a person would."""

    def run(*overrides: str, cwd: Path = PROJECT, seconds: int = 600) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROJECT / "train.py"), *overrides]
        return subprocess.run(command, cwd=cwd, env=ENVIRON, capture_output=True, text=True, timeout=seconds)

    return run


@pytest.fixture(scope="session")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, dict[str, float]]]:
    """Train command lines one after the other in `num_ranks` processes: the imports are paid once."""

    def run(cases: dict[str, list[str]], num_ranks: int, seconds: int = 900) -> dict[str, dict[str, float]]:
        folder = tmp_path_factory.mktemp("cases")
        out = folder / "metrics.json"
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(PROJECT / "tests" / "cases.py"), str(out), json.dumps(cases)]
        ranks, logs = [], [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        for rank, log in enumerate(logs):
            environ = ENVIRON | (place | {"LOCAL_RANK": str(rank)} if num_ranks > 1 else {"OMP_NUM_THREADS": "1"})
            with log.open("w") as stream:
                ranks.append(
                    subprocess.Popen(command, cwd=PROJECT, env=environ, stdout=stream, stderr=subprocess.STDOUT)
                )
        try:
            codes = [rank.wait(timeout=seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()  # ended already, unless the wait ran out or was interrupted
        assert codes == [0] * num_ranks, "\n".join(log.read_text()[-3000:] for log in logs)
        return json.loads(out.read_text())

    return run


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def scalars(run_dir: Path, tag: str) -> list[float]:
    """The values of one TensorBoard scalar, in the order of steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [event.value for event in events.Scalars(tag)]
