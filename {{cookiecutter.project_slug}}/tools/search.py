"""What a search has found: python tools/search.py FOLDER

Its trials, the best first, and the command line of the best one. In a job, before the ranks: --ask RUN_DIR.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from hpc.config import errors
from hpc.studies import search_command


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what submit.py --search has named")
    parser.add_argument("--ask", action="store_true", help="FOLDER is a run's: ask for its values, write its config")
    asked = parser.parse_args()
    if asked.ask:
        run_dir = asked.folder.absolute()
        lines = [f"{run_dir.name}: {' '.join(search_command.assign_values(run_dir))}"]
    else:
        lines = search_command.list_trials(asked.folder)
    print("\n".join(map(errors.make_printable, lines)), flush=True)


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
