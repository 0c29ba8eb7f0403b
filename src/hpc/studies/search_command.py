"""The two things that tools/search.py does: list the trials of a search, and give a member its values.

A member asks for its values in its job, before its ranks start.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from hpc.config import arguments, compose, errors, trust
from hpc.config.errors import ConfigError
from hpc.config.parse import parse
from hpc.run import frozen_config
from hpc.studies import search


def list_trials(folder: Path) -> list[str]:
    """Return a line per trial, the best first, and the command line of the best one. Raises `ConfigError`."""
    search.load_search(folder.absolute())
    with _reject_damaged_study(folder):
        from hpc.studies import trial_table

        return trial_table.study_lines(folder.absolute())


def write_member_config(run_dir: Path) -> list[str]:
    """Get the values of a member, write its config into its run directory, and return its overrides.

    Raises:
        ConfigError: there is no search, its study cannot be read, or the config is rejected.
    """
    search.load_search(run_dir.parent)
    with _reject_damaged_study(run_dir.parent):
        from hpc.studies import optuna_study

        words = optuna_study.draw_member_overrides(run_dir)
    cfg = compose.compose_overrides(words)
    trust.reject_untrusted(cfg, run_dir)  # the overrides come from a file in the folder
    cfg.run_dir = str(run_dir)
    arguments.check_files(parse(cfg))
    frozen_config.create_or_replace(run_dir, cfg, words=words)
    return words


@contextmanager
def _reject_damaged_study(folder: Path) -> Iterator[None]:
    """Raise `ConfigError` for any error while a study is read: a damaged journal can fail anywhere in Optuna."""
    try:
        yield
    except (ConfigError, OmegaConfBaseException):
        raise
    except ImportError as error:
        rule = f"must be installed, but cannot be imported ({error})"
        raise ConfigError("The package optuna", None, rule, "pip install optuna -c constraints.txt") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {errors.first_line(error)}"
        rule = f"The study in {folder / 'journal.jsonl'} cannot be read ({reason})"
        fix = "python report.py FOLDER, as the runs themselves are not damaged"
        raise ConfigError("FOLDER", folder, rule, fix) from error
