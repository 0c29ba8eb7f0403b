"""Choose between the two answers of report.py: all about one run, or a table of several."""

import os
from collections.abc import Sequence
from pathlib import Path

from hpc.config import errors, project
from hpc.report import run_table
from hpc.run import history


def lines(places: Sequence[Path]) -> list[str]:
    """Return the lines for the terminal; of one run directory, write its page as well.

    Args:
        places: run directories, or folders of them; none: the project's runs/.

    Raises:
        ConfigError: a place that is no directory.
    """
    for place in places:
        if not os.path.isdir(place):  # False, too, where no file can have this name
            rule = "is a file" if os.path.lexists(place) else "there is no such directory"
            raise errors.ConfigError(str(place), None, rule, "python report.py RUN_DIR, or nothing for runs/")
    places = places or [project.PROJECT / "runs"]
    runs = history.find(places[0]) if len(places) == 1 else []
    if len(runs) == 1 and runs[0].path == places[0]:
        from hpc.report import files  # what draws is not needed for a table

        return files.made(runs[0])
    return run_table.lines(places)
