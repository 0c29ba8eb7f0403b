"""What ran and how: python report.py [RUN_DIR_OR_FOLDER ...]

Of one run directory, all that is known of it, here and as the page RUN_DIR/report.html; otherwise a table of the runs,
newest last.
"""

import argparse
import os
import signal
import sys
from io import TextIOWrapper
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from hpc.config import errors, project
from hpc.report import run_table
from hpc.run import history


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = "run directories, or folders of them; default: runs/"
    parser.add_argument("places", nargs="*", type=Path, metavar="RUN_DIR_OR_FOLDER", help=runs)
    asked = parser.parse_args().places
    for place in asked:
        if not os.path.isdir(place):  # False, too, where no file can have this name
            rule = "is a file" if os.path.lexists(place) else "there is no such directory"
            raise errors.ConfigError(str(place), None, rule, "python report.py RUN_DIR, or nothing for runs/")
    places = asked or [project.PROJECT / "runs"]
    found = history.find(places[0]) if len(places) == 1 else []
    if len(found) == 1 and found[0].path == places[0]:
        from hpc.report import run_report  # what draws is not needed for a table

        lines = run_report.write_report(found[0])
    else:
        lines = run_table.table_lines(places)
    print("\n".join(map(errors.printable, lines)))


if __name__ == "__main__":
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: no traceback
    with errors.exit_on_config_error():
        main()
