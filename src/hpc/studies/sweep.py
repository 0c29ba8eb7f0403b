"""A sweep: all combinations of `key=a,b` on one command line, as members of one job array."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from hpc.config import compose
from hpc.config.errors import ConfigError
from hpc.config.sections import TEXT_KEYS
from hpc.jobs.job import Job
from hpc.submit.options import MAX_ARRAY_SIZE


def compose_members(overrides: Sequence[str], folder: Path) -> list[tuple[DictConfig, list[str]]]:
    """Return the config and the overrides of each combination.

    Each config has a run directory of its own below `folder`, which is named after the values that vary.

    Raises:
        ConfigError: no key has several values, there are too many combinations, or a config is rejected.
    """
    reject_run_dir(overrides)
    choices = [list_choices(override) for override in overrides]
    if not any(len(values) > 1 for values in choices):
        raise ConfigError("--multirun", None, "At least one key must have several values", "seed=0,1,2")
    combinations = list(product(*choices))
    if len(combinations) > MAX_ARRAY_SIZE:
        rule = f"must make at most {MAX_ARRAY_SIZE} runs, as they are one job array"
        raise ConfigError("--multirun", f"{len(combinations)} combinations", rule, "fewer values")
    members = []
    composed: dict[tuple[str, ...], DictConfig] = {}  # by all words but those that give keys other values
    groups = compose.config_groups()
    for number, words in enumerate(combinations):
        varied = [word for word, values in zip(words, choices, strict=True) if len(values) > 1]
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", "_".join([str(number), *varied]))[:120]
        values = [word for word in varied if word.partition("=")[0] not in groups]
        first = composed.get(fixed := tuple(word for word in words if word not in values))
        cfg = (first and compose.with_values(first, values)) or compose.compose_overrides(words)
        composed.setdefault(fixed, cfg)
        cfg.run_dir = str(folder / name)
        members.append((cfg, list(words)))
    return members


def reject_run_dir(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` if the command line sets one run directory for several runs."""
    if word := next((override for override in overrides if override.startswith("run_dir=")), None):
        rule = "cannot be set for several runs: each of them has a directory of its own below runs/"
        raise ConfigError("run_dir", word.partition("=")[2], rule, "leave run_dir= out")


def reject_different_requests(jobs: Sequence[Job]) -> None:
    """Raise `ConfigError` if these jobs request different resources, as members of one job array cannot."""
    for job in jobs[1:]:
        for field, value in vars(job).items():
            if value != (first := getattr(jobs[0], field)) and field not in ("name", "code"):
                rule = f"must request the same resources for all its runs; here {field} is {first} and {value}"
                raise ConfigError("The job array", None, rule, "submit these as arrays of their own")


def parse_override(override: str) -> Override | None:
    """Return an override as Hydra parses it; None if it cannot: then the config's own check says what is wrong."""
    try:
        return OverridesParser.create().parse_override(override)
    except (HydraException, OmegaConfBaseException):
        return None


def list_choices(override: str) -> list[str]:
    """Return an override per value: `seed=0,1` as [`seed=0`, `seed=1`].

    An override with a single value, and one that Hydra cannot parse, is returned unchanged.
    """
    parsed = parse_override(override)
    if parsed is None or not parsed.is_sweep_override():
        return [override]
    if not parsed.is_discrete_sweep():
        rule = "A sweep needs a list of values, and only a search draws from an interval"
        raise ConfigError(override, None, rule, "--search random --trials 20")
    key = override.partition("=")[0]
    try:
        values = list(parsed.sweep_string_iterator())
    except HydraException as error:  # glob(*) is for the choices of a group
        rule = f"A sweep must list its values: {error}"
        raise ConfigError(override, None, rule, "the values themselves, separated by commas") from None
    if key in TEXT_KEYS:  # compose takes these literally, but Hydra puts backslashes before colons and spaces
        values = [value if value[:1] in ("'", '"') else re.sub(r"\\(.)", r"\1", value) for value in values]
    return [f"{key}={value}" for value in values]
