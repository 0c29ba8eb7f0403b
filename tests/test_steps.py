"""Count calls and collectives of a step. `make bench` measures its time."""

import sys
from pathlib import Path

import pytest
from conftest import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import steps
from bench_project import make_project, project_command, rank_commands
from turns import STEPS_PER_SECOND, measure_turns


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("fork"))


@pytest.mark.slow
def test_function_calls_of_a_step_with_everything_on(project: Path, tmp_path: Path) -> None:
    programs = {"ours": [project_command(project, tmp_path / "run", *steps.TINY)]}
    (calls,) = measure_turns(programs, tmp_path, steps=300, turns=1, meter="calls", warm_up=100)["ours"]
    assert calls <= 2500


@pytest.mark.soak
def test_watching_the_nodes_adds_nothing_to_a_step(project: Path, tmp_path: Path) -> None:
    """Check that the monitor adds only two calls for each of its six hooks, by which Lightning looks them up."""
    words = {"watched": [], "not": ["callbacks.monitor=null"]}
    programs = {name: [project_command(project, tmp_path / name, *steps.TINY, *more)] for name, more in words.items()}
    calls = measure_turns(programs, tmp_path, steps=300, turns=1, meter="calls", warm_up=100)
    assert calls["watched"][0] - calls["not"][0] <= 2 * 6 + 1


@pytest.mark.soak
def test_ranks_exchange_gradients_and_nothing_else(project: Path, tmp_path: Path) -> None:
    """Check the collectives: only gradients, one agreement per second, and one point of the curves per fifty steps."""
    steps_made = 5 * STEPS_PER_SECOND
    programs = {
        "plain": rank_commands(steps.plain_gpt_command(tmp_path), 2),
        "ours": rank_commands(steps.gpt_command(project, tmp_path, "run", *steps.TWO_RANKS), 2),
    }
    made = {
        meter: measure_turns(programs, tmp_path, steps=steps_made, turns=1, meter=meter, warm_up=30)
        for meter in ("collectives", "collectives, sum")
    }
    assert made["collectives"]["ours"] == made["collectives"]["plain"]
    agreements, points = 5, 1
    assert made["collectives, sum"]["ours"][0] == made["collectives, sum"]["plain"][0] + agreements + points


@pytest.mark.soak
def test_fsdp_gathers_the_last_block_once_and_the_others_twice(project: Path, tmp_path: Path) -> None:
    command = steps.gpt_command(project, tmp_path, "kept", "strategy=fsdp", "trainer.devices=2")
    programs = {"kept": rank_commands(command, 2)}
    made = measure_turns(programs, tmp_path, steps=20, turns=1, meter="collectives", warm_up=30)
    parts = steps.GPT["layers"] + 1  # the blocks, and the other weights, which also stay gathered
    gathered, reduced, norm = parts + parts - 2, parts, 1
    assert made == {"kept": [gathered + reduced + norm]}
