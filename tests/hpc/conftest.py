"""Fixtures shared by the tests of hpc: a fork, and real runs in separate processes."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from desk import desk as desk
from fork import ENVIRON, PROJECT, free_port, place

from hpc.config import signatures
from hpc.config.errors import ExitCode

signatures.is_training = True  # tests import the classes anyway


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def call() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python train.py ...` as a user would."""

    def run(*overrides: str, cwd: Path = PROJECT, seconds: int = 600) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROJECT / "train.py"), *overrides]
        return subprocess.run(command, cwd=cwd, env=ENVIRON, capture_output=True, text=True, timeout=seconds)

    return run


@pytest.fixture(scope="session")
def run_cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, dict[str, float]]]:
    """Train command lines one after the other in `num_ranks` processes, which import the libraries only once."""

    def run(cases: dict[str, list[str]], num_ranks: int, seconds: int = 900) -> dict[str, dict[str, float]]:
        folder = tmp_path_factory.mktemp("cases")
        out = folder / "metrics.json"
        port = free_port()
        command = [sys.executable, str(PROJECT / "tests" / "cases.py"), str(out), json.dumps(cases)]
        ranks, logs = [], [folder / f"rank{rank}.log" for rank in range(num_ranks)]
        for rank, log in enumerate(logs):
            environ = ENVIRON | {"OMP_NUM_THREADS": "1"} | (place(rank, num_ranks, port) if num_ranks > 1 else {})
            with log.open("w") as stream:
                ranks.append(
                    subprocess.Popen(command, cwd=PROJECT, env=environ, stdout=stream, stderr=subprocess.STDOUT)
                )
        try:
            codes = [rank.wait(timeout=seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()  # only has an effect if the wait timed out or was interrupted
        assert codes == [0] * num_ranks, "\n".join(log.read_text()[-3000:] for log in logs)
        return json.loads(out.read_text())

    return run


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., str]]:
    """Start train.py as real ranks, forked by ranks.py, for a new or a resumed run; return their output.

    stop_at: all ranks leave with code 85 after this many steps. patch: code that each rank executes first.
    """
    command = [sys.executable, str(PROJECT / "tests" / "ranks.py")]
    process = subprocess.Popen(command, env=ENVIRON, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    ask, answers = process.stdin, process.stdout

    def run(
        run_dir: Path,
        ranks: int,
        words: Sequence[str],
        stop_at: int | None = None,
        patch: str = "",
        code: int | list[int] | None = None,
    ) -> str:
        code = code if code is not None else 0 if stop_at is None else ExitCode.CONTINUE
        expected = code if isinstance(code, list) else [code] * ranks
        key = "resume" if (run_dir / "config.yaml").exists() else "run_dir"
        log = run_dir.with_suffix(".log")
        begun = log.stat().st_size if log.exists() else 0
        plan = {"words": [f"{key}={run_dir}", *words], "ranks": ranks, "stop_at": stop_at, "patch": patch}
        ask.write(json.dumps({"log": str(log), **plan}) + "\n")
        ask.flush()
        codes = json.loads(answers.readline())
        said = log.read_bytes()[begun:].decode(errors="replace")
        assert codes == expected, f"{codes} {said[-5000:]}"
        return said

    yield run
    ask.close()
    process.wait(timeout=60)


@pytest.fixture
def together(tmp_path: Path) -> Callable[..., list[Any]]:
    """Call function(rank, *arguments) of a test module in real processes that form one gloo group.

    Return their results in order of ranks: plain data, or None for a process that was killed.
    """
    begun = iter(range(100))

    def run(function: Callable[..., Any], num_ranks: int, *arguments: Any, seconds: float = 300) -> list[Any]:
        context = multiprocessing.get_context("forkserver")  # imports torch once for all of them
        context.set_forkserver_preload(["torch.distributed", "lightning"])
        folder = tmp_path / f"ranks-{next(begun)}"
        folder.mkdir()
        ranks = [
            context.Process(target=_rank, args=(function, rank, num_ranks, folder, arguments), daemon=True)
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        limit = time.monotonic() + seconds
        for rank in ranks:
            rank.join(max(limit - time.monotonic(), 0))
        late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
        assert not late, f"ranks {late} did not end within {seconds} s"
        said = [json.loads(file.read_text()) if file.exists() else {} for file in _answers(folder, num_ranks)]
        assert not (failed := [words["raised"] for words in said if "raised" in words]), "\n".join(failed)
        return [words.get("returned") for words in said]

    return run


def _rank(function: Callable[..., Any], rank: int, num_ranks: int, folder: Path, arguments: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
        said = {"returned": function(rank, *arguments)}
    except BaseException:
        said = {"raised": f"rank {rank}: {traceback.format_exc()}"}
    _answers(folder, num_ranks)[rank].write_text(json.dumps(said))
    os._exit(0)  # the group's destructor would wait for ranks that were killed


def _answers(folder: Path, num_ranks: int) -> list[Path]:
    return [folder / f"said-{rank}.json" for rank in range(num_ranks)]
