"""What a search has found: python tools/search.py FOLDER

Its trials, the best first, and the command line of the best one. In a job, before the ranks: --ask RUN_DIR.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from {{ cookiecutter.package_name }}.hpc import config
from {{ cookiecutter.package_name }}.hpc.checks import preflight
from {{ cookiecutter.package_name }}.hpc.config import Refused
from {{ cookiecutter.package_name }}.hpc.jobs import commandline, move
from {{ cookiecutter.package_name }}.hpc.studies import search


def main() -> None:
    parser = config.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what submit.py --search has named")
    parser.add_argument("--ask", action="store_true", help="FOLDER is a run's: ask for its values, write its config")
    asked = parser.parse_args()
    if asked.ask:
        return ask(asked.folder.absolute())
    search.load(asked.folder.absolute())
    refuse_without_optuna()
    from {{ cookiecutter.package_name }}.hpc.studies import trials

    print("\n".join(trials.lines(asked.folder.absolute())))


def ask(run_dir: Path) -> None:
    """Leave the config of a member in its directory, as any run has one."""
    search.load(run_dir.parent)
    refuse_without_optuna()
    from {{ cookiecutter.package_name }}.hpc.studies import study

    words = study.ask(run_dir)
    cfg = commandline.compose_overrides(words)
    cfg.run_dir = str(run_dir)
    preflight.check(cfg)
    move.keep(run_dir, cfg, words)
    print(f"{run_dir.name}: {' '.join(words)}", flush=True)


def refuse_without_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise Refused("optuna", None, f"cannot be imported: {error}", "pip install optuna -c constraints.txt") from None


if __name__ == "__main__":
    with config.refusals():
        main()
