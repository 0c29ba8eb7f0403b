"""Ranks that are forked from warm libraries: their places, their ends, and what they leave behind."""

import os
import time
from pathlib import Path

import pytest

from hpc.studies.forked_starts import ForkedStarts

pytestmark = pytest.mark.slow

PLACES = """
import os, sys
from hpc.launch.placement import read_placement
place = read_placement(os.environ)
print(place.rank, place.world_size, sys.argv[1:], os.path.basename(os.getcwd()) != "tmp")
"""
ONE_FAILS = """
import os, subprocess, sys, time
print("child", subprocess.Popen(["sleep", "600"]).pid)
if os.environ["PMI_RANK"] == "1":
    sys.exit(7)
time.sleep(600)
"""


def start(folder: Path, code: str, num_ranks: int, limit_seconds: float = 100) -> tuple[int, list[str]]:
    (folder / "program.py").write_text(code)
    starts, log = ForkedStarts(limit_seconds), folder / "log"
    ended = starts.run(str(folder / "program.py"), ["a=1", "b='x y'"], num_ranks=num_ranks, log=log)
    return ended, log.read_text().splitlines()


def test_each_rank_has_its_place_and_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")  # this shell may be a task of srun
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    code, lines = start(tmp_path, PLACES, 2)
    assert code == 0
    assert sorted(lines) == [f"{rank} 2 ['a=1', \"b='x y'\"] True" for rank in (0, 1)]
    assert start(tmp_path, PLACES, 1)[1][-1] == "0 1 ['a=1', \"b='x y'\"] True"


def test_an_error_is_a_traceback_in_the_log(tmp_path: Path) -> None:
    code, lines = start(tmp_path, "import sys; sys.path.no_such_name", 1)
    assert code == 1 and lines[-1] == "AttributeError: 'list' object has no attribute 'no_such_name'"


@pytest.mark.parametrize("limit", [100.0, 3.0])
def test_no_rank_and_no_child_outlives_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    monkeypatch.setattr("hpc.studies.forked_starts.GRACE_SECONDS", 1.0)
    program = ONE_FAILS if limit > 3 else ONE_FAILS.replace("sys.exit(7)", "pass")
    code, lines = start(tmp_path, program, 2, limit)
    assert code == (7 if limit > 3 else 1)
    assert ("Error: it did not end within 3.0 s. A smaller network ends sooner" in lines) is (limit == 3)
    children = [int(line.split()[1]) for line in lines if line.startswith("child ")]
    until = time.monotonic() + 20
    while any(Path(f"/proc/{child}/exe").exists() for child in children) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(children) == 2 and not any(os.path.exists(f"/proc/{child}/exe") for child in children)
