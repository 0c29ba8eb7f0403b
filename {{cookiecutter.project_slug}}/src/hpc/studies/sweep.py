"""One command line, many runs: all combinations of `key=a,b`, as members of one job array."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hpc.config.compose import compose_overrides
from hpc.config.errors import ConfigError
from hpc.config.sections import TEXT_KEYS
from hpc.jobs.job import Job
from hpc.submit.options import MAX_ARRAY_SIZE


def members(overrides: Sequence[str], folder: Path) -> list[tuple[DictConfig, list[str]]]:
    """Per combination a config, with a run directory of its own below `folder`, named by what varies; and its words.

    Raises:
        ConfigError: nothing varies, too much does, or what any config rejects.
    """
    reject_run_dir(overrides)
    values = [choices(override) for override in overrides]
    if not any(len(some) > 1 for some in values):
        raise ConfigError("--multirun", None, "no key has several values", "seed=0,1,2")
    combinations = list(product(*values))
    if len(combinations) > MAX_ARRAY_SIZE:
        rule = f"must have at most {MAX_ARRAY_SIZE} combinations of values"
        raise ConfigError("--multirun", len(combinations), rule, "fewer values")
    found = []
    for number, words in enumerate(combinations):
        varied = [word for word, some in zip(words, values, strict=True) if len(some) > 1]
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", "_".join([str(number), *varied]))[:120]
        cfg = compose_overrides(words)
        cfg.run_dir = str(folder / name)
        found.append((cfg, list(words)))
    return found


def reject_run_dir(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` where one directory is named for several runs."""
    if typed := next((override for override in overrides if override.startswith("run_dir=")), None):
        raise ConfigError(
            typed, None, "each run of a sweep has a directory of its own, below runs/", "leave run_dir= out"
        )


def reject_unlike(jobs: Sequence[Job]) -> None:
    """Members of an array share what they ask the scheduler for. Raises `ConfigError` where they do not."""
    for job in jobs[1:]:
        for field, value in vars(job).items():
            if value != (first := getattr(jobs[0], field)) and field not in ("name", "code"):
                rule = f"one job array asks for the same for all its runs; here {field} is {first} and {value}"
                raise ConfigError("job array", None, rule, "submit these as arrays of their own")


def parsed(override: str) -> Override | None:
    """A word as Hydra reads it; None where it cannot: compose says what is wrong with it."""
    try:
        return OverridesParser.create().parse_override(override)
    except (HydraException, OmegaConfBaseException):
        return None


def choices(override: str) -> list[str]:
    """`seed=0,1` as [`seed=0`, `seed=1`]; a single value, and what Hydra cannot read, as it stands."""
    word = parsed(override)
    if word is None or not word.is_sweep_override():
        return [override]
    if not word.is_discrete_sweep():
        rule = "is no list of values; a search draws from an interval"
        raise ConfigError(override, None, rule, "--search random --trials 20")
    key = override.partition("=")[0]
    try:
        values = list(word.sweep_string_iterator())
    except HydraException as error:  # glob(*) is for the choices of a group
        rule = f"must list the values of a sweep: {error}"
        raise ConfigError(override, None, rule, "the values themselves, with commas between") from None
    if key in TEXT_KEYS:  # compose takes these as they are typed, Hydra puts backslashes before colons and spaces
        values = [value if value[:1] in ("'", '"') else re.sub(r"\\(.)", r"\1", value) for value in values]
    return [f"{key}={value}" for value in values]
