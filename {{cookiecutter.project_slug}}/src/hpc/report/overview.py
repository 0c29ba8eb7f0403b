"""The answer of report.py: the report of one run, or a table of several."""

import os
from collections.abc import Sequence
from pathlib import Path

from hpc.config import project
from hpc.config.errors import ConfigError
from hpc.report import run_table
from hpc.run import history


def write_report_or_table(places: Sequence[Path]) -> list[str]:
    """Return the lines for the terminal. For a single run directory, write its page, too.

    Args:
        places: run directories, or folders of them; empty: the project's runs/.

    Raises:
        ConfigError: a place that is not a directory.
    """
    for place in places:
        if not os.path.isdir(place):  # also False for a name that no file can have
            rule = (
                "must be a directory, but it is a file" if os.path.lexists(place) else "must be an existing directory"
            )
            raise ConfigError(str(place), None, rule, "python report.py RUN_DIR, or python report.py for all of runs/")
    places = places or [project.PROJECT / "runs"]
    runs = history.find_runs(places[0]) if len(places) == 1 else []
    if len(runs) == 1 and runs[0].path == places[0]:
        from hpc.report import run_report  # its charts are slow to import, and a table needs none

        return run_report.write_report(runs[0])
    return run_table.table_lines(places)
