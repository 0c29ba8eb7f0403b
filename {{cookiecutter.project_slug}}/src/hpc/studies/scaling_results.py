"""What a scaling study leaves: scaling.csv, scaling.md and scaling.png, and of failed points what to type."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc.charts import chart
from hpc.checkpoint import on_disk
from hpc.config.project import PROJECT
from hpc.studies import run_rates, scaling_notes, scaling_table
from hpc.studies.scaling_jobs import Try
from hpc.studies.scaling_points import Study

PATIENCE = 600  # seconds for plan.py, which traces a large network once


def conclude(study: Study, tries: Sequence[Try], *, folder: Path, words: Sequence[str]) -> int:
    """Write the table as far as points are done, print what is missing and what to type; return the exit code.

    Args:
        folder: the study's.
        words: as typed.
    """
    runs = {one.point.nodes: one.run for one in tries if one.run and one.finished}
    rates = {nodes: numbers for nodes, run in runs.items() if (numbers := run_rates.read(run.path))}
    if rates:
        write(study, tries, folder=folder, rates=rates)
    for one in tries:
        if one.failed and one.run:
            print(f"{one.name} {one.state.name}: {one.state.reason}")
            resume = f"python submit.py resume={shlex.quote(str(one.run.path))}"
            kept = on_disk.list_checkpoints(one.run.path)
            print(f"  to go on from its last checkpoint: {resume}" if kept else "  it left no checkpoint to go on from")
        elif one.finished and one.point.nodes not in rates:
            print(f"{one.name} finished, but left no curves of perf/ that can be read")
    if any(one.failed for one in tries):
        print(f"  to start afresh, with the code as it is now: {command(words)} --again")
    if waits := any(one.state.is_active for one in tries):
        print(f"the rest, once their jobs have ended: {command(words)}")
    return 0 if waits or len(rates) == len(tries) else 1


def write(study: Study, tries: Sequence[Try], *, folder: Path, rates: dict[int, run_rates.Measured]) -> None:
    """Print the table of the points that are done, and write it with its picture into the folder."""
    points = [one.point for one in tries]
    plans = {point.nodes: plan(point.words) for point in points if point.nodes in rates}
    rows = scaling_table.rows(points, rates, plans)
    cells, below = scaling_table.table(rows), scaling_notes.below(study, points, rows)
    print("\n".join([*scaling_table.aligned(cells), *scaling_notes.wrapped(below)]))
    title = f"{study.scaling.capitalize()} scaling, {study.steps} steps: `{' '.join(study.words)}`"
    (folder / "scaling.md").write_text(scaling_table.markdown(title, cells, below), encoding="utf-8")
    (folder / "scaling.csv").write_text(scaling_table.as_csv(rows), encoding="utf-8")
    chart.write_png(scaling_table.charts(study, rows), folder / "scaling.png")
    print(f"{folder}/scaling.csv, scaling.md, scaling.png")


def plan(words: Sequence[str]) -> scaling_table.Plan:
    """Return what plan.py predicts for these words, where it can."""
    typed = [sys.executable, str(PROJECT / "plan.py"), *words, "--json"]
    try:
        said = json.loads(subprocess.run(typed, capture_output=True, text=True, timeout=PATIENCE).stdout)
        return scaling_table.Plan(said.get("rate"), (said.get("step") or {}).get("seconds"))
    except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired):
        return scaling_table.Plan()


def command(words: Sequence[str]) -> str:
    """Return the command line of the study."""
    return shlex.join(["python", "tools/scale.py", *words])
