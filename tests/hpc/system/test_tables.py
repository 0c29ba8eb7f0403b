"""Check tables for the terminal: plain text that no terminal wraps and no name can change."""

import pytest

from hpc.system.tables import table_lines


def test_columns_are_aligned_numbers_to_the_right() -> None:
    rows = [["a", "5", "1e-05", "finished"], ["bcd", "1000", "-", "pending (Priority)"]]
    assert table_lines(["run", "nodes", "lr", "state"], rows) == [
        "run  nodes     lr  state",
        "a        5  1e-05  finished",
        "bcd   1000      -  pending (Priority)",
    ]


def test_no_terminal_changes_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COLUMNS": "20", "FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)
    names = ["[b]bold[/b]", "[/]", ":smile:", "x" * 300, "a b" * 50]
    lines = table_lines(["name", "state"], [[name, "running"] for name in names])
    assert [line.rpartition("  ")[0].rstrip() for line in lines[1:]] == names
    assert not any("\x1b" in line for line in lines)


def test_a_table_without_rows_has_its_head() -> None:
    assert table_lines(["run", "state"], []) == ["run  state"]
