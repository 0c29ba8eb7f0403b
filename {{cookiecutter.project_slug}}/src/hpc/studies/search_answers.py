"""What tools/search.py answers: the trials of a search, and the values of a member before its ranks start."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from hpc.config import compose, errors, preflight, trust
from hpc.config.errors import ConfigError
from hpc.run import frozen_config
from hpc.studies import search


def trials(folder: Path) -> list[str]:
    """Return the trials of a search, the best first, and the command line of the best one. Raises `ConfigError`."""
    search.load(folder.absolute())
    reject_without_optuna()
    from hpc.studies import trial_table

    with rejected_if_damaged(folder):
        return trial_table.lines(folder.absolute())


def ask(run_dir: Path) -> list[str]:
    """Ask for the values of a member, leave its config in its directory, as any run has one; return its words."""
    search.load(run_dir.parent)
    reject_without_optuna()
    from hpc.studies import optuna_study

    with rejected_if_damaged(run_dir.parent):
        words = optuna_study.ask(run_dir)
    cfg = compose.compose_overrides(words)
    trust.reject(cfg, run_dir)  # the words come from the folder
    cfg.run_dir = str(run_dir)
    preflight.check(cfg)
    frozen_config.keep(run_dir, cfg, words)
    return words


@contextmanager
def rejected_if_damaged(folder: Path) -> Iterator[None]:
    """Raise `ConfigError` for whatever fails as a study is read: what is no journal can fail anywhere in Optuna."""
    try:
        yield
    except (ConfigError, OmegaConfBaseException):
        raise
    except Exception as error:
        rule = f"its study cannot be read: {type(error).__name__}: {errors.reason(error)}"
        raise ConfigError(
            "SEARCH", folder, rule, "another folder; its runs are sound: python report.py FOLDER"
        ) from error


def reject_without_optuna() -> None:
    """Raise `ConfigError` where optuna cannot be imported."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "optuna", None, f"cannot be imported: {error}", "pip install optuna -c constraints.txt"
        ) from None
