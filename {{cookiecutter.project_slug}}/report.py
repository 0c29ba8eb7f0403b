"""What ran and how, newest last: python report.py [RUN_DIR_OR_FOLDER ...]"""

import argparse
import sys
from io import TextIOWrapper
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from {{ cookiecutter.package_name }}.hpc import config, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    runs = "run directories, or folders of them; default: runs/"
    parser.add_argument("places", nargs="*", type=Path, metavar="RUN_DIR_OR_FOLDER", help=runs)
    places = parser.parse_args().places or [config.PROJECT / "runs"]
    print("\n".join(report.lines(places)))


if __name__ == "__main__":
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show
    main()
