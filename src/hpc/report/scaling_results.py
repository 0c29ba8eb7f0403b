"""The results of a scaling study: a table for the terminal, scaling.csv and scaling.html in its folder."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpc.charts import page
from hpc.config.errors import ConfigError
from hpc.report import run_table, scaling_table
from hpc.report.endings import has_stopped_unfinished
from hpc.report.scaling_table import ScalingRow
from hpc.report.whole_file import write_whole
from hpc.run import history
from hpc.studies import scaling_file
from hpc.system.tables import one_line

NOT_SUBMITTED = "not submitted"


def point_lines(folder: Path) -> list[str]:
    """Return lines for the terminal; of a study that cannot be read, why not. Write the table and its charts."""
    try:
        points = scaling_file.load_points(folder)
    except ConfigError as error:
        return [one_line(line) for line in str(error).splitlines()]
    runs = history.find_runs(folder)
    rows_of_runs, _ = run_table.query_rows(runs)
    found = {run.path.name: (run, row) for run, row in zip(runs, rows_of_runs, strict=True)}
    states, rates, advice = {}, {}, []
    for point in points:
        run, row = found.get(point.name, (None, None))
        states[point.nodes] = row.state if row else NOT_SUBMITTED
        if run is None or row is None:
            advice.append(f"{point.name} is not submitted: the command of the study submits it")
        elif not run.is_finished and (has_stopped_unfinished(row) or row.state == NOT_SUBMITTED):
            advice.append(f"to go on with {point.name}: python submit.py resume={shlex.quote(str(run.path))}")
        elif run.is_finished and (rate := scaling_table.read_rates(run.path)):
            rates[point.nodes] = rate
        elif run.is_finished:
            advice.append(f"{point.name} has finished, but has no readable curves of perf/")
    rows = scaling_table.make_rows(points, states, rates)
    return [*scaling_table.format_rows(rows), *advice, *(_write(rows, folder) if rates else [])]


def _write(rows: Sequence[ScalingRow], folder: Path) -> list[str]:
    """Write the table and its charts into the folder of the study. Return lines on the outcome."""
    html = page.render_charts(scaling_table.make_charts(rows), folder.name)
    files = {"scaling.csv": scaling_table.to_csv(rows).encode(), "scaling.html": html}
    return [write_whole(folder / name, content) for name, content in files.items()]
