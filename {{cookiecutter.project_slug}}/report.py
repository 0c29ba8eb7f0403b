"""What ran and how: python report.py [RUN_DIR_OR_FOLDER ...]

Of one run directory, all that is known of it, here and as the page RUN_DIR/report.html; otherwise a table of the runs,
newest last.
"""

import argparse
import signal
import sys
from io import TextIOWrapper
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from hpc.config import errors
from hpc.report import overview


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = "run directories, or folders of them; default: runs/"
    parser.add_argument("places", nargs="*", type=Path, metavar="RUN_DIR_OR_FOLDER", help=runs)
    lines = overview.report_lines(parser.parse_args().places)
    print("\n".join(map(errors.make_printable, lines)))


if __name__ == "__main__":
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has read enough: no traceback
    with errors.exit_on_config_error():
        main()
