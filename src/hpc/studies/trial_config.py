"""The config of a run of a search: its values are drawn in its job, before its ranks start."""

from pathlib import Path

from hpc.config import arguments, compose, trust
from hpc.config.parse import parse
from hpc.run import frozen_config
from hpc.studies import search


def draw(run_dir: Path) -> str:
    """Draw the values of a run, write its config into its run directory, and return its overrides as a line.

    Raises:
        ConfigError: there is no search, its study cannot be read, or the config is rejected.
    """
    search.load_search(run_dir.parent)
    with search.reject_damaged_study(run_dir.parent):
        from hpc.studies import optuna_study

        words = optuna_study.draw_member_overrides(run_dir)
    cfg = compose.compose_overrides(words)
    trust.reject_untrusted(cfg, run_dir)  # the overrides come from a file in the folder
    cfg.run_dir = str(run_dir)
    arguments.check_files(parse(cfg))
    frozen_config.create_or_replace(run_dir, cfg, words=words)
    return f"{run_dir.name}: {' '.join(words)}"
