"""Report on runs: python report.py [RUN_DIR_OR_FOLDER ...]

One run directory: everything known about the run, printed here and written as the page RUN_DIR/report.html. Otherwise:
a table of the runs, newest last. Below that of a search, its trials; below that of a scaling study, its points, also
written as scaling.csv and scaling.html.
"""

import argparse
import signal
import sys
from io import TextIOWrapper
from pathlib import Path

from hpc.config import errors
from hpc.report import overview


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths_help = "run directories, or folders of them; default: runs/"
    parser.add_argument("paths", nargs="*", type=Path, metavar="RUN_DIR_OR_FOLDER", help=paths_help)
    print("\n".join(overview.write_report_or_table(parser.parse_args().paths)))


def run() -> None:
    """Do what the command line says, and exit."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal cannot show
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end without a traceback when `| head` closes the pipe
    with errors.exit_on_config_error():
        main()
