"""Ports: research of others is brought to a project, and all that the project promises is tried with it.

A draw is a port and a column of the table.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import slurm_nodes
from marked_text import put as put_text
from slurm_project import Desk, made_for_tests

from trial.campaign import Campaign, Outcome, Tried
from trial.ports.brought import DATA, LAYOUTS, PORTS, Brought

ON_SLURM = "killed on Slurm"
COLUMNS = [*LAYOUTS, "plan", "report", ON_SLURM]
COMMAND = "make ports OUT=docs/bring-your-own.md"
MADE = ("same bits", "traced", "on real samples", "yes", "ends")


class Ports(Campaign):
    name, unit = "ports", "cell"
    GOOD, ACCEPTED = (*MADE, "left out"), (*MADE, "left out")

    def __init__(self, folder: Path, project: Path | None = None) -> None:
        super().__init__(folder, project)
        self.brought, self.stack = Brought(self.project, folder / "runs"), ExitStack()
        self.desk: Desk | None = None

    def __enter__(self) -> "Ports":
        if reason := slurm_nodes.missing():
            print(f"nothing is submitted: {reason}")
        else:
            (self.folder / "slurm").mkdir()
            slurm = self.stack.enter_context(slurm_nodes.cluster(self.folder / "slurm", slurm_nodes.NODES[:1]))
            self.desk = Desk(slurm, made_for_tests(self.project))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def numbers(self, seed: int, count: int) -> Sequence[int]:
        return range(min(count, len(DATA) * len(COLUMNS)))

    def draw(self, seed: int, number: int) -> tuple[str, str]:
        return list(DATA)[number // len(COLUMNS)], COLUMNS[number % len(COLUMNS)]

    def kind(self, drawn: tuple[str, str]) -> str:
        return drawn[0]

    def attempt(self, drawn: tuple[str, str], place: Path, *, patch: str = "") -> Outcome:
        name, column = drawn
        cell = self._cell(name, column)
        return Outcome(cell if cell in self.GOOD else "failed", cell)

    def _cell(self, name: str, column: str) -> str:
        """Return what a cell of the table says."""
        if column in LAYOUTS:
            return self.brought.train(name, column) or self.brought.resume(name, column, stop_at=8) or "same bits"
        if column == "plan":
            return self.brought.plan(name)
        if column == ON_SLURM:
            return (self.brought.submit(name, self.desk) or "ends") if self.desk else "left out"
        layout = "ddp on two"
        is_trained = self.brought.run_dir(name, layout).exists() or not self.brought.train(name, layout)
        return (self.brought.report(name, layout) or "yes") if is_trained else "it does not train"

    def publish(self, done: Sequence[Tried], asked: Any) -> None:
        rows: dict[str, dict[str, str]] = {}
        for one in done:
            name, column = self.draw(one.seed, one.number)
            rows.setdefault(name, {})[column] = one.outcome.said
        print(f"\n{table(rows)}")
        if asked.out:
            put_text(f"{table(rows)}\n`{COMMAND}`, in the template, makes this table.\n", asked.out, name="ports")


def table(rows: dict[str, dict[str, str]]) -> str:
    """Return a Markdown table, with a row for each port."""
    lines = [f"| port | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, cells in rows.items():
        lines.append(f"| {title(name)} | {' | '.join(cells.get(column, 'not tried') for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def title(name: str) -> str:
    """Return the first line of a port's own docstring."""
    text = (PORTS / name / f"research_{name}.py").read_text()
    return text.partition('"""')[2].partition('"""')[0].splitlines()[0].rstrip(".")
