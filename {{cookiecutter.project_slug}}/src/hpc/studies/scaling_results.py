"""The results of a scaling study: scaling.csv, scaling.md and scaling.html, and what to type for failed points."""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpc.charts import page
from hpc.checkpoint import on_disk
from hpc.config.project import PROJECT
from hpc.studies import run_rates, scaling_charts, scaling_footnotes, scaling_table
from hpc.studies.run_rates import RunRates
from hpc.studies.scaling_jobs import PointJob
from hpc.studies.scaling_points import ScalingStudy

PLAN_TIMEOUT_SECONDS = 600  # plan.py traces a large network once


def report_results(study: ScalingStudy, jobs: Sequence[PointJob], *, folder: Path, words: Sequence[str]) -> int:
    """Write the table of all finished points, print what is missing and what to type; return the exit code.

    Args:
        folder: the study's.
        words: the command line of the study.
    """
    finished_runs = {job.point.num_nodes: job.run for job in jobs if job.run and job.is_finished}
    rates = {nodes: measured for nodes, run in finished_runs.items() if (measured := run_rates.read_rates(run.path))}
    if rates:
        write_results(study, jobs, folder=folder, rates=rates)
    for job in jobs:
        if job.has_failed and job.run:
            print(f"{job.name} {job.state.name}: {job.state.reason}")
            command = f"python submit.py resume={shlex.quote(str(job.run.path))}"
            has_checkpoint = bool(on_disk.list_checkpoints(job.run.path))
            print(f"  to resume from its last checkpoint: {command}" if has_checkpoint else "  it left no checkpoint")
        elif job.is_finished and job.point.num_nodes not in rates:
            print(f"{job.name} finished, but has no readable curves of perf/")
    if any(job.has_failed for job in jobs):
        print(f"  to start anew, with the current code: {study_command(words)} --again")
    is_active = any(job.state.is_active for job in jobs)
    if is_active:
        print(f"for the rest, once their jobs have ended: {study_command(words)}")
    return 0 if is_active or len(rates) == len(jobs) else 1


def write_results(
    study: ScalingStudy, jobs: Sequence[PointJob], *, folder: Path, rates: Mapping[int, RunRates]
) -> None:
    """Print the table of the measured points, and write it with its charts into the folder.

    Args:
        rates: by number of nodes.
    """
    points = [job.point for job in jobs]
    plans = {point.num_nodes: predict_rate(point.words) for point in points if point.num_nodes in rates}
    rows = scaling_table.make_rows(points, rates, plans=plans)
    cells, notes = scaling_table.format_cells(rows), scaling_footnotes.footnotes(study, points, rows)
    print("\n".join([*scaling_table.align_columns(cells), *scaling_footnotes.wrap_notes(notes)]))
    title = f"{study.scaling.capitalize()} scaling, {study.steps} steps: `{' '.join(study.words)}`"
    (folder / "scaling.md").write_text(scaling_table.to_markdown(title, cells, notes=notes), encoding="utf-8")
    (folder / "scaling.csv").write_text(scaling_table.to_csv(rows), encoding="utf-8")
    page.write_page(scaling_charts.make_charts(study, rows), folder / "scaling.html", title=title)
    print(f"{folder}/scaling.csv, scaling.md, scaling.html")


def predict_rate(words: Sequence[str]) -> scaling_table.PredictedRate:
    """Return what plan.py predicts for these overrides; no values if it fails."""
    command = [sys.executable, str(PROJECT / "plan.py"), *words, "--json"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=PLAN_TIMEOUT_SECONDS).stdout
        plan = json.loads(output)
        return scaling_table.PredictedRate(plan.get("rate"), (plan.get("step") or {}).get("seconds"))
    except (OSError, ValueError, AttributeError, subprocess.TimeoutExpired):
        return scaling_table.PredictedRate()


def study_command(words: Sequence[str]) -> str:
    """Return the command line of the study."""
    return shlex.join(["python", "tools/scale.py", *words])
