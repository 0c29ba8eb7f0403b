"""One command line, many runs: all combinations of `key=a,b`, as members of one job array."""

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from .commandline import compose_overrides
from .config import Refused
from .job import Job
from .layout import TEXT

MOST = 1000  # members; Slurm's default MaxArraySize is 1001


def members(overrides: Sequence[str], folder: Path) -> list[tuple[DictConfig, list[str]]]:
    """Per combination a config, with a run directory of its own below `folder`, named by what varies; and its words.

    Raises:
        Refused: nothing varies, too much does, or what any config refuses.
    """
    if typed := next((override for override in overrides if override.startswith("run_dir=")), None):
        raise Refused(typed, None, "each run of a sweep has a directory of its own, below runs/", "leave run_dir= out")
    choices = [_choices(override) for override in overrides]
    if not any(len(values) > 1 for values in choices):
        raise Refused("--multirun", None, "no key has several values", "seed=0,1,2")
    combinations = list(product(*choices))
    if len(combinations) > MOST:
        raise Refused("--multirun", len(combinations), f"at most {MOST} runs make an array", "fewer values")
    found = []
    for number, words in enumerate(combinations):
        varied = [word for word, values in zip(words, choices, strict=True) if len(values) > 1]
        name = re.sub(r"[^A-Za-z0-9._=+-]+", "_", "_".join([str(number), *varied]))[:120]
        cfg = compose_overrides(words)
        cfg.run_dir = str(folder / name)
        found.append((cfg, list(words)))
    return found


def refuse_unlike(jobs: Sequence[Job]) -> None:
    """Members of an array share what they ask the scheduler for. Raises `Refused` where they do not."""
    for job in jobs[1:]:
        for field, value in vars(job).items():
            if value != (first := getattr(jobs[0], field)) and field not in ("name", "code"):
                rule = f"one job array asks for the same for all its runs; here {field} is {first} and {value}"
                raise Refused("--multirun", None, rule, "submit these as sweeps of their own")


def _choices(override: str) -> list[str]:
    """`seed=0,1` as [`seed=0`, `seed=1`]; a single value, and what Hydra cannot read, as it stands."""
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return [override]  # compose says what is wrong with it
    if not parsed.is_sweep_override():
        return [override]
    key = override.partition("=")[0]
    values = list(parsed.sweep_string_iterator())
    if key in TEXT:  # compose takes these as they are typed, Hydra puts backslashes before colons and spaces
        values = [value if value[:1] in ("'", '"') else re.sub(r"\\(.)", r"\1", value) for value in values]
    return [f"{key}={value}" for value in values]
