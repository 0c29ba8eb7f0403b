"""Try all that the project promises with the research in ports/, and make a table: python port_table.py PROJECT

PROJECT is a baked project, to which the ports are brought. `make ports` bakes one.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import slurm_nodes
from marked_text import put
from port_runs import DATA, LAYOUTS, PORTS, Ports
from slurm_project import Desk, made_for_tests

ON_SLURM = "killed on Slurm"
COLUMNS = [*LAYOUTS, "plan", "report", ON_SLURM]
COMMAND = "make ports OUT=docs/bring-your-own.md"


def tries(ports: Ports, name: str, desk: Desk | None) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each column with the function that fills it, which returns what a cell says."""
    for layout in LAYOUTS:
        yield layout, partial(train_and_resume, ports, name, layout)
    yield "plan", partial(ports.plan, name)
    yield "report", lambda: ports.report(name, "ddp on two") or "yes"
    if desk:
        yield ON_SLURM, lambda: ports.submit(name, desk) or "ends"


def train_and_resume(ports: Ports, name: str, layout: str) -> str:
    return ports.train(name, layout) or ports.resume(name, layout, stop_at=8) or "same bits"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--ports", default=",".join(DATA))
    parser.add_argument("--out", type=Path, help="a page with marks, between which the table goes")
    asked = parser.parse_args()
    ports, desk = Ports(asked.project.resolve(), asked.runs.resolve()), None
    rows: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        stack.callback(ports.close)
        if reason := slurm_nodes.missing():
            print(f"nothing is submitted: {reason}")
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ports")))
            slurm = stack.enter_context(slurm_nodes.cluster(folder, slurm_nodes.NODES[:1]))
            desk = Desk(slurm, made_for_tests(ports.project))
        for name in asked.ports.split(","):
            rows[name] = {}
            for column, fill in tries(ports, name, desk):
                rows[name][column] = fill()
                print(f"{name:13} {column:16} {rows[name][column]}", flush=True)
    print(f"\n{table(rows)}")
    if asked.out:
        put(f"{table(rows)}\n`{COMMAND}`, in the template, makes this table.\n", asked.out, name="ports")
    good = {"same bits", "traced", "on real samples", "yes", "ends"}
    return int(any(cell not in good for cells in rows.values() for cell in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
