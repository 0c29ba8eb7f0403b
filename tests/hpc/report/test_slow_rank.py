"""Check when a rank counts as one that the others wait for, and the sentence on it."""

import re
import shlex
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_findings import config, make_statistics
from test_page import made, reported
from torch.utils.tensorboard.writer import SummaryWriter

from hpc.config import compose
from hpc.monitor.event_files import RunCurves
from hpc.report.findings import list_findings
from hpc.report.slow_rank import TAGS, SlowRank, find_slow_rank
from hpc.run import attempt_log
from hpc.run.history import AttemptRecord

HOSTS = ["n1", "n2", "n3", "n4"]
ATTEMPT = AttemptRecord(1, 0.0, "17", HOSTS, 8, None)
Exchange = tuple[float, float, float]  # rank, its own seconds, those of the fastest
SLOW = SlowRank(5, "n3", 0.05, 0.02, 11, 12)
NODES = ["trainer=ddp_4node", "cluster=juwels_booster", "cluster.account=a"]


def curves(exchanges: list[Exchange], *, begin: int = 0, repeats: int = 1) -> RunCurves:
    """Return curves with a point at every tenth step of 0.1 s. Each exchange has so many points."""
    points = [point for point in exchanges for _ in range(repeats)]
    steps = [begin + 10 * number for number in range(len(points))]
    values = {tag: [point[index] for point in points] for index, tag in enumerate(TAGS)}
    columns = values | {"perf/step_seconds": [0.1] * len(points)}
    return RunCurves({tag: list(zip(steps, column, strict=True)) for tag, column in columns.items()})


def measured(ranks: list[int], slow: float = 0.05, fast: float = 0.02) -> list[Exchange]:
    """Return exchanges in which these ranks are the slowest, each with a time of its own."""
    return [(rank, slow + number / 1e5, fast) for number, rank in enumerate(ranks)]


def test_the_rank_its_node_and_its_seconds_are_found() -> None:
    found = find_slow_rank(curves(measured([5, 5, 5, 5, 2, 5, 5, 5, 5, 5, 5, 5])), ATTEMPT)
    assert found and (found.rank, found.host, found.num_slowest, found.num_exchanges) == (5, "n3", 11, 12)
    assert found.own_seconds == pytest.approx(0.05, rel=0.01) and found.wait_seconds == pytest.approx(0.03, rel=0.01)
    assert find_slow_rank(curves(measured([0] * 12)), ATTEMPT).host == "n1"  # type: ignore[union-attr]
    unknown = replace(ATTEMPT, hosts=[], world_size=0)
    assert find_slow_rank(curves(measured([5] * 12)), unknown).host == ""  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("exchanges", "repeats"),
    [
        pytest.param(measured([5] * 10 + [2, 3]), 1, id="another rank in 2 of 12"),
        pytest.param(measured([1, 0] * 10), 1, id="each in turn"),
        pytest.param(measured([5] * 12, fast=0.041), 1, id="a wait of 9 % of a step"),
        pytest.param(measured([5] * 9), 1, id="too few exchanges"),
        pytest.param(measured([5] * 4), 10, id="too few exchanges with many points each"),
        pytest.param([(nan, number / 10, 0.0) for number in range(20)], 1, id="damaged"),
        pytest.param([], 1, id="nothing measured"),
    ],
)
def test_a_healthy_run_has_none(exchanges: list[Exchange], repeats: int) -> None:
    assert find_slow_rank(curves(exchanges, repeats=repeats), ATTEMPT) is None


def test_only_the_newest_attempt_counts_whose_nodes_are_known() -> None:
    both = curves(measured([5] * 12))
    for tag, points in curves(measured([2] * 12, slow=0.06), begin=1000).points.items():
        both.points[tag] += points
    assert find_slow_rank(both, ATTEMPT) is None, "as each is the slowest in half of the points"
    assert find_slow_rank(both, replace(ATTEMPT, from_step=1000)).host == "n2"  # type: ignore[union-attr]
    assert find_slow_rank(both, replace(ATTEMPT, from_step=1100)) is None
    assert find_slow_rank(both, None) is None


def test_the_sentence_names_rank_node_factor_and_what_to_type() -> None:
    (sentence, *_) = list_findings(make_statistics(slow_rank=SLOW), config(NODES))
    expected = "Rank 5 on n3 is slow: by itself it takes 50 ms of a step, 2.5 times as long as the fastest rank (20 ms)"
    assert sentence.startswith(expected) and "in 11 of 12 exchanges" in sentence and "during 30 % of a step" in sentence
    typed = shlex.split(re.findall("`(.+?)`", sentence)[0])
    assert OmegaConf.select(compose.compose_overrides([*NODES, *typed]), "cluster.options") == ["--exclude=n3"]
    beside = config([*NODES, 'cluster.options=["--gres-flags=a,b"]'])
    typed = shlex.split(re.findall("`(.+?)`", list_findings(make_statistics(slow_rank=SLOW), beside)[0])[0])
    assert compose.compose_overrides([*NODES, *typed]).cluster.options == ["--gres-flags=a,b", "--exclude=n3"]
    (sentence, *_) = list_findings(make_statistics(slow_rank=replace(SLOW, fastest_seconds=0.0)), config(NODES))
    assert "more than 100 times as long" in sentence


@pytest.mark.parametrize(
    ("words", "host"),
    [(NODES, ""), (["trainer=ddp", *NODES[1:]], "n3"), (["trainer=ddp_4node", "cluster=pbs"], "n3")],
    ids=["unknown host", "one node", "PBS"],
)
def test_where_no_node_can_be_excluded_a_sentence_says_where_to_look(words: list[str], host: str) -> None:
    (sentence, *_) = list_findings(make_statistics(slow_rank=replace(SLOW, host=host)), config(words))
    assert "--exclude" not in sentence and "Compare its node and device" in sentence
    assert sentence.startswith("Rank 5 on n3 is" if host else "Rank 5 is")


@pytest.mark.parametrize("damaged", [{}, {"cluster": 3, "trainer": [1]}, {"trainer": {"num_nodes": "x"}}])
def test_a_damaged_config_gives_a_sentence_all_the_same(damaged: dict[str, Any]) -> None:
    assert list_findings(make_statistics(slow_rank=SLOW), damaged)[0].startswith("Rank 5 on n3")


def test_each_number_of_the_sentence_stands_elsewhere_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = made(tmp_path / "digits", monkeypatch)
    writer = SummaryWriter(str(run_dir / "tensorboard"))
    for tag, points in curves(measured([3] * 12, slow=0.153, fast=0.034)).points.items():
        for step, value in points:
            writer.add_scalar(tag, value if tag != "perf/step_seconds" else 0.2, int(step))
    writer.close()
    read, _ = reported(run_dir)
    sentence = next(text for text in read.under("What limits the run").split(" | ") if "is slow" in text)
    elsewhere = " ".join(text for heading, text in read.texts if heading != "What limits the run")
    numbers = re.findall(r"\d[\d.]* (?:%|ms|s)(?!\w)", sentence)
    assert "Rank 3 on n2 is slow: by itself it takes 153 ms" in sentence and len(numbers) == 3
    assert [number for number in numbers if number not in elsewhere] == []
    environ = {"SLURM_JOB_ID": "17"}  # requeued, so what was measured before says nothing about the present nodes
    attempt_log.record_start(run_dir, 3, environ=environ, from_step=60, hosts=["n3", "n4"], world_size=4)
    assert "is slow" not in reported(run_dir)[0].under("What limits the run")
