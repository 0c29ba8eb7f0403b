"""What a rejection says to type."""

import re
import shlex
from collections.abc import Iterator, Sequence

from hpc.config.errors import ConfigError

WORD = re.compile(r"[~+]?[A-Za-z_][\w.@/]*=[^<>]+")


def retyped(overrides: Sequence[str], error: ConfigError) -> Iterator[list[str]]:
    """Yield the overrides with each alternative of a fix that can be typed as it stands, without a value to fill in."""
    for alternative in re.split(r", or | or |; ", error.fix):
        try:
            words = shlex.split(alternative)
        except ValueError:  # prose
            continue
        if words and all(WORD.fullmatch(word) and not word.endswith("...") for word in words):
            replaced = {error.key, *map(name, words)}
            yield [*(word for word in overrides if name(word) not in replaced), *words]


def name(word: str) -> str:
    return word.lstrip("~+").partition("=")[0]
