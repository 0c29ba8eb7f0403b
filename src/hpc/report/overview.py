"""The answer of report.py: the report of one run, also as report.html in its directory; or a table of several.

Below the table of a search stand its trials, and below that of a scaling study its points.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from hpc.config import project
from hpc.config.errors import ConfigError
from hpc.report import run_table
from hpc.report.terminal import section_lines
from hpc.report.whole_file import write_whole
from hpc.run import directory, history
from hpc.run.history import RunRecord
from hpc.studies import scaling_file
from hpc.system.tables import make_console

PAGE = "report.html"


def write_report_or_table(places: Sequence[Path]) -> list[str]:
    """Return the lines for the terminal. For a single run directory, write its page, too.

    Args:
        places: run directories, or folders of them; empty: the project's runs/.

    Raises:
        ConfigError: a place that is not a directory.
    """
    for place in places:
        if not os.path.isdir(place):  # also False for a name that no file can have
            exists = os.path.lexists(place)
            rule = "must be a directory, but it is a file" if exists else "must be an existing directory"
            raise ConfigError(str(place), None, rule, "python report.py RUN_DIR, or python report.py for all of runs/")
    places = places or [project.PROJECT / "runs"]
    runs = history.find_runs(places[0]) if len(places) == 1 else []
    if len(runs) == 1 and runs[0].path == places[0]:
        return write_report(runs[0])
    return [*run_table.format_runs(places), *(line for place in places for line in _result_lines(place))]


def _result_lines(place: Path) -> list[str]:
    """Return what the runs of this folder have found together, if they are those of a search or of a scaling study."""
    folder = place.absolute()
    if (folder / directory.SEARCH_FILE).exists():
        from hpc.report import search_results  # like the following one slow to import, and a table needs none of them

        return ["", *search_results.trial_lines(folder)]
    if (folder / scaling_file.FILE).exists():
        from hpc.report import scaling_results

        return ["", *scaling_results.point_lines(folder)]
    return []


def write_report(run: RunRecord) -> list[str]:
    """Write the page, and return the lines for the terminal, the last of which names the page."""
    from hpc.report import page, run_data, sections  # slow to import, and a table needs none of them

    blocks = sections.run_sections(run_data.read_run_data(run))
    return [*section_lines(blocks, make_console()), "", write_whole(run.path / PAGE, page.render_html(blocks))]
