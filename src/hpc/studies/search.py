"""A search: one job array whose members get their values from a common study. This part needs no optuna."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError, first_line
from hpc.config.sections import Config
from hpc.run import directory
from hpc.studies import search_space, sweep
from hpc.submit.options import SAMPLERS
from hpc.system import files
from hpc.system.files import write_atomically

FILE = directory.SEARCH_FILE


@dataclass(frozen=True)
class Search:
    """The settings that all members share. Its fields are the keys of search.json."""

    sampler: str
    trials: int
    seed: int
    metric: str  # logged in validation
    mode: str  # min or max
    words: list[str]  # the command line as it was typed


def compose_corners(overrides: Sequence[str], folder: Path) -> list[tuple[DictConfig, list[str]]]:
    """Return the configs and overrides at the ends of the space: if one of them is rejected, some run would be, too.

    Raises:
        ConfigError: no key is searched, or a config cannot be composed.
    """
    sweep.reject_run_dir(overrides)
    corners = []
    for values in search_space.list_corners(search_space.parse_space(overrides)):
        words = search_space.fill_in(overrides, values)
        cfg = compose_overrides(words)
        cfg.run_dir = str(folder / "000")
        corners.append((cfg, words))
    return corners


def make_search(words: Sequence[str], cfgs: Sequence[Config], *, sampler: str, trials: int) -> Search:
    """Return the search that a command line describes.

    Args:
        words: the command line.
        cfgs: the configs of its corners.

    Raises:
        ConfigError: optuna is not installed, the runs do not train, or they share no metric.
    """
    first = cfgs[0]
    if find_spec("optuna") is None:
        rule = "A search needs the package optuna, which is not installed"
        raise ConfigError("--search", sampler, rule, "pip install optuna -c constraints.txt")
    if other := next((cfg.task for cfg in cfgs if cfg.task != "train"), None):
        raise ConfigError("task", other, "must be train, as the runs of a search train", "leave task out")
    if len({(cfg.checkpoint.monitor, cfg.checkpoint.mode) for cfg in cfgs}) > 1:
        rule = "must be the same for all runs, with one checkpoint.mode, as a search has one metric"
        raise ConfigError("checkpoint.monitor", None, rule, "one monitor, one mode")
    if not first.checkpoint.monitor:
        rule = "must name the metric that the search minimizes (checkpoint.mode=min) or maximizes (checkpoint.mode=max)"
        raise ConfigError("checkpoint.monitor", "null", rule, "checkpoint.monitor=val/loss")
    return Search(sampler, trials, first.seed, first.checkpoint.monitor, first.checkpoint.mode, list(words))


def member_run_dirs(folder: Path, num_members: int) -> list[Path]:
    """Return a run directory per member, whose name is the member's number."""
    return [folder / f"{number:03}" for number in range(num_members)]


def save_search(folder: Path, search: Search) -> None:
    """Write the settings into the folder of the search."""
    write_atomically(folder / FILE, json.dumps(asdict(search), indent=1))


def load_search(folder: Path) -> Search:
    """Return the settings of the search in this folder. Raises `ConfigError` if there is none that can be read."""
    try:
        search = Search(**files.parse_json(files.read_text(folder / FILE)))
        types = {"trials": int, "seed": int, "metric": str, "words": list}
        if not all(isinstance(getattr(search, name), kind) for name, kind in types.items()):
            raise ValueError("a value has the wrong type")
        if search.sampler not in SAMPLERS or search.mode not in ("min", "max"):
            raise ValueError("its sampler or its mode is unknown")
        if not all(isinstance(word, str) for word in search.words):
            raise ValueError("its words are no text")
        return search
    except (OSError, ValueError, TypeError) as error:
        reason = f"{FILE} cannot be read: {getattr(error, 'strerror', None) or error}"
        if isinstance(error, FileNotFoundError):
            reason = f"it holds no {FILE}"
        rule = f"This is not the folder of a search: {reason}"
        fix = "runs/<the folder that submit.py --search has printed>"
        raise ConfigError("FOLDER", folder, rule, fix) from None


@contextmanager
def reject_damaged_study(folder: Path) -> Iterator[None]:
    """Raise `ConfigError` for any error while a study is read: a damaged journal can fail anywhere in Optuna."""
    try:
        yield
    except (ConfigError, OmegaConfBaseException):
        raise
    except ImportError as error:
        rule = f"must be installed, but cannot be imported ({error})"
        raise ConfigError("The package optuna", None, rule, "pip install optuna -c constraints.txt") from None
    except Exception as error:
        rule = f"The study in {folder / 'journal.jsonl'} cannot be read ({type(error).__name__}: {first_line(error)})"
        fix = "a new search, as the runs of this one are not damaged, but its trials are lost"
        raise ConfigError("FOLDER", folder, rule, fix) from error
