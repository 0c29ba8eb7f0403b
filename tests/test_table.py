"""Test benchmarks/results.json, and the README's tables of it."""

import json
import re
import sys

import pytest
from conftest import REPO
from impossible_jobs import IMPOSSIBLE

sys.path.insert(0, str(REPO / "benchmarks"))

from result_rows import make_row
from table import MARKS, is_goal_reached, make_tables

RESULTS = json.loads((REPO / "benchmarks" / "results.json").read_text(encoding="utf-8"))
# Goals that the machine of the last `make bench` did not reach. A row that reaches its goal is taken out.
MISSED: set[str] = set()


def test_the_readme_shows_what_was_measured():
    found = MARKS.search((REPO / "README.md").read_text(encoding="utf-8"))
    assert found and found[0] == found[1] + make_tables(RESULTS) + found[2]
    assert (REPO / "docs" / "speed.png").exists()


def test_the_reference_shows_each_job_that_can_never_start():
    table = (REPO / "docs" / "reference.md").read_text(encoding="utf-8").split("<!-- impossible -->")[1]
    rows = re.findall(r"(?m)^\| (.+) \| `(.+)` \| [\d.]+ \|$", table.split("<!-- end of impossible -->")[0])
    assert rows == [(what, sentence) for what, (_, sentence) in IMPOSSIBLE.items()]


def test_the_pictures_of_the_readme_are_small():
    text = (REPO / "README.md").read_text(encoding="utf-8")
    pictures = set(re.findall(r"docs/[\w-]+\.png", text))
    assert pictures == {f"docs/{file.name}" for file in (REPO / "docs").glob("*.png")}
    assert all((REPO / name).stat().st_size < 300_000 for name in pictures)


def test_no_goal_is_missed_but_those_that_are_known():
    rows = [row for row in RESULTS if row["goal"] is not None]
    assert {row["name"] for row in rows if not is_goal_reached(row)} == MISSED and len(rows) > len(MISSED)


def test_every_row_says_when_and_where():
    keys = {"name", "value", "unit", "goal", "better", "spread", "machine", "date"}
    assert all(set(one) == keys and one["machine"] and one["date"] for one in RESULTS)
    assert len({one["name"] for one in RESULTS}) == len(RESULTS)


@pytest.mark.parametrize(("better", "value", "expected"), [
    ("lower", 1.0, True), ("lower", 1.1, False), ("higher", 1.0, True), ("higher", 0.9, False),
])  # fmt: skip
def test_a_goal_is_reached_or_missed(better, value, expected):
    one = make_row("name", [value], "", 1.0, better)
    assert is_goal_reached(one) is expected
    assert ("missed" in make_tables([one | {"machine": "here", "date": "today"}])) is not expected
