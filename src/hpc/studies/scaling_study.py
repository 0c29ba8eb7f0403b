"""A scaling study: check all points, submit those that have no job, wait, then write a table and a page of charts."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc.charts import page
from hpc.checkpoint import on_disk
from hpc.studies import run_rates, scaling_jobs, scaling_points, scaling_table
from hpc.studies.scaling_jobs import NOT_SUBMITTED, PointRun
from hpc.submit import queue_run
from hpc.submit.options import SubmitOptions


def run_study(words: Sequence[str], *, dry_run: bool = False, retry_failed: bool = False, wait: bool = True) -> int:
    """Do what a command line asks for, and return the exit code. Called again, it continues.

    Args:
        dry_run: print the points and the first job, and write nothing.
        retry_failed: submit failed points again.
        wait: return only when no job of the study is queued or running.

    Returns:
        0: finished, queued or running; 1: a point has failed, or finished without a measured rate; 130: interrupted by
        Ctrl-C, which cancels no job.

    Raises:
        ConfigError: a point cannot run, or the folder holds something else.
    """
    points = scaling_points.compose_points(scaling_points.parse_study(words))
    scaling_jobs.reject_other_study(points)
    runs = scaling_jobs.read_runs(points)
    if dry_run:
        print("\n".join(scaling_table.format_rows(scaling_table.make_rows(runs, {}))), flush=True)
        queue_run.submit_run(points[0].cfg, points[0].overrides, options=SubmitOptions(dry_run=True))
        return 0
    command = shlex.join(["python", "tools/scale.py", *words])
    try:
        scaling_jobs.submit_missing(runs, retry_failed=retry_failed)
        runs = scaling_jobs.wait_for_jobs(points) if wait else scaling_jobs.read_runs(points)
    except KeyboardInterrupt:
        print(f"\ninterrupted: queued jobs keep running; to continue, type\n  {command}", file=sys.stderr)
        return 130
    return report_results(runs, command=command)


def report_results(runs: Sequence[PointRun], *, command: str) -> int:
    """Print and write the table, print what to type for points that failed or still run; return the exit code.

    Args:
        command: the command line of the study.
    """
    finished = [run.point for run in runs if run.is_finished]
    rates = {point.num_nodes: rate for point in finished if (rate := run_rates.read_rates(point.run_dir))}
    rows = scaling_table.make_rows(runs, rates)
    print("\n".join(scaling_table.format_rows(rows)))
    if rates:
        write_results(rows, folder=runs[0].point.run_dir.parent)
    for run in runs:
        if run.has_failed:
            print(f"{run.point.name} {run.state.name}: {run.state.reason}")
            start = "from its last checkpoint" if on_disk.list_checkpoints(run.point.run_dir) else "from the first step"
            print(f"  to run the same code again, {start}: {command} --retry-failed")
            print(f"  to run changed code: rm -r {shlex.quote(str(run.point.run_dir))}, then {command}")
        elif run.is_finished and run.point.num_nodes not in rates:
            print(f"{run.point.name} finished, but has no readable curves of perf/")
    unfinished = [run for run in runs if run.state.is_active or run.state.name == NOT_SUBMITTED]
    if unfinished:
        print(f"to see the other points once their jobs have ended: {command}")
    return 0 if len(rates) + len(unfinished) == len(runs) else 1


def write_results(rows: Sequence[scaling_table.ScalingRow], *, folder: Path) -> None:
    """Write the table and its charts into the folder of the study."""
    (folder / "scaling.csv").write_text(scaling_table.to_csv(rows), encoding="utf-8")
    page.write_page(scaling_table.make_charts(rows), folder / "scaling.html", title=folder.name)
    print(f"{folder}/scaling.csv, scaling.html; for each run: python report.py {shlex.quote(str(folder))}")
