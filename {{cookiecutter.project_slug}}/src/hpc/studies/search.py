"""A search: one job array whose members ask a common study for their values. What of it needs no optuna."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError
from hpc.run import directory
from hpc.studies import search_space, sweep
from hpc.submit.options import SAMPLERS
from hpc.system import files
from hpc.system.files import put

if TYPE_CHECKING:
    from hpc.studies.optuna_study import Member

FILE = directory.SEARCH


@dataclass(frozen=True)
class Search:
    """What all members must know alike."""

    sampler: str
    trials: int
    seed: int
    metric: str  # logged in validation
    mode: str  # min or max
    words: list[str]  # as typed


def corners(overrides: Sequence[str], folder: Path) -> list[tuple[DictConfig, list[str]]]:
    """Compose the configs at the ends of what is searched: where one is rejected, a run of the search would be.

    Raises:
        ConfigError: nothing is searched, or what any config rejects.
    """
    sweep.reject_run_dir(overrides)
    found = []
    for values in search_space.corners(search_space.of(overrides)):
        words = search_space.filled(overrides, values)
        cfg = compose_overrides(words)
        cfg.run_dir = str(folder / "000")
        found.append((cfg, words))
    return found


def plan(words: Sequence[str], cfgs: Sequence[DictConfig], *, sampler: str, trials: int) -> Search:
    """Return the search of the command line, given its corners, or raise `ConfigError` where they share no metric."""
    first = cfgs[0]
    if find_spec("optuna") is None:
        raise ConfigError("--search", sampler, "needs the package optuna", "pip install optuna -c constraints.txt")
    if any(cfg.test_only for cfg in cfgs):
        raise ConfigError("test_only", "true", "a search trains", "leave test_only out")
    if len({(cfg.checkpoint.monitor, cfg.checkpoint.mode) for cfg in cfgs}) > 1:
        raise ConfigError("checkpoint.monitor", None, "a search has one metric", "one monitor, one mode")
    if not first.checkpoint.monitor:
        rule = "names what the search makes small (checkpoint.mode=min) or large (max)"
        raise ConfigError("checkpoint.monitor", "null", rule, "checkpoint.monitor=val/loss")
    return Search(sampler, trials, first.seed, first.checkpoint.monitor, first.checkpoint.mode, list(words))


def run_dirs(folder: Path, trials: int) -> list[Path]:
    """One per member; its name is the member's number."""
    return [folder / f"{number:03}" for number in range(trials)]


def save(folder: Path, search: Search) -> None:
    put(folder / FILE, json.dumps(asdict(search), indent=1))


def load(folder: Path) -> Search:
    """Raise `ConfigError` where there is no search that this code can read."""
    try:
        asked = Search(**files.parsed(files.text(folder / FILE)))
        texts = isinstance(asked.words, list) and all(isinstance(word, str) for word in (asked.metric, *asked.words))
        if not texts or not all(isinstance(number, int) for number in (asked.trials, asked.seed)):
            raise ValueError("its values are of other types")
        if asked.sampler not in SAMPLERS or asked.mode not in ("min", "max"):
            raise ValueError("it names another sampler or mode")
        return asked
    except (OSError, ValueError, TypeError) as error:
        why = f"it holds no {FILE}" if isinstance(error, FileNotFoundError) else f"{FILE} is damaged: {error}"
        if isinstance(error, PermissionError):
            why = f"you may not read {FILE}"
        fix = "runs/<the folder that submit.py --search has named>"
        raise ConfigError("SEARCH", folder, f"is no folder of a search: {why}", fix) from None


def member(run_dir: Path) -> "Member | None":
    """Return what a run of a search tells its study; None: it has none. For one process of the run."""
    if not directory.is_of_search(run_dir):
        return None
    from hpc.studies import optuna_study  # optuna, from here on

    return optuna_study.member(run_dir)
