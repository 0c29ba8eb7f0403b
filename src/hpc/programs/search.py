"""Print the results of a search: python tools/search.py FOLDER

Prints its trials, the best first, and the command line of the best one. Job scripts call it with --ask RUN_DIR before
they start the ranks.
"""

import argparse
from pathlib import Path

from hpc.config import errors
from hpc.studies import search_command


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder that submit.py --search has printed")
    ask_help = "FOLDER is a run directory: draw its values and write its config"
    parser.add_argument("--ask", action="store_true", help=ask_help)
    arguments = parser.parse_args()
    if arguments.ask:
        run_dir = arguments.folder.absolute()
        lines = [f"{run_dir.name}: {' '.join(search_command.write_member_config(run_dir))}"]
    else:
        lines = search_command.list_trials(arguments.folder)
    print("\n".join(map(errors.make_printable, lines)), flush=True)


def run() -> None:
    """Do what the command line says, and exit."""
    with errors.exit_on_config_error():
        main()
