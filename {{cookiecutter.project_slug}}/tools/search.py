"""What a search has found: python tools/search.py FOLDER

Its trials, the best first, and the command line of the best one. In a job, before the ranks: --ask RUN_DIR.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from omegaconf.errors import OmegaConfBaseException

from hpc.config import compose, errors, preflight, trust
from hpc.config.errors import ConfigError
from hpc.run import frozen_config
from hpc.studies import search


def main() -> None:
    parser = errors.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what submit.py --search has named")
    parser.add_argument("--ask", action="store_true", help="FOLDER is a run's: ask for its values, write its config")
    asked = parser.parse_args()
    if asked.ask:
        return ask(asked.folder.absolute())
    search.load(asked.folder.absolute())
    reject_without_optuna()
    from hpc.studies import trial_table

    with damaged(asked.folder):
        lines = trial_table.lines(asked.folder.absolute())
    print("\n".join(map(errors.printable, lines)))


def ask(run_dir: Path) -> None:
    """Leave the config of a member in its directory, as any run has one."""
    search.load(run_dir.parent)
    reject_without_optuna()
    from hpc.studies import optuna_study

    with damaged(run_dir.parent):
        words = optuna_study.ask(run_dir)
    cfg = compose.compose_overrides(words)
    trust.reject(cfg, run_dir)  # the words come from the folder
    cfg.run_dir = str(run_dir)
    preflight.check(cfg)
    frozen_config.create_or_replace(run_dir, cfg, words=words)
    print(errors.printable(f"{run_dir.name}: {' '.join(words)}"), flush=True)


@contextmanager
def damaged(folder: Path) -> Iterator[None]:
    """Around what reads a study: what is no journal can fail anywhere in Optuna."""
    try:
        yield
    except (ConfigError, OmegaConfBaseException):
        raise
    except Exception as error:
        rule = f"its study cannot be read: {type(error).__name__}: {errors.reason(error)}"
        raise ConfigError("SEARCH", folder, rule, "another folder; its runs are sound: python report.py FOLDER") from error


def reject_without_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError("optuna", None, f"cannot be imported: {error}", "pip install optuna -c constraints.txt") from None


if __name__ == "__main__":
    with errors.exit_on_config_error():
        main()
