"""What a rejection says to type."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from hpc.config.errors import ConfigError

WORD = re.compile(r"[~+]?[A-Za-z_][\w.@/]*=[^<>]+")
LIST = re.compile(r", (?=[~+]?[A-Za-z_][\w.@/]*=)")
OPTION = re.compile(r"--[a-z-]+")


def retyped(words: Sequence[str], error: ConfigError) -> Iterator[list[str]]:
    """Yield the words with each alternative of a fix that can be typed as it stands, without a value to fill in."""
    key = error.key.partition(" ")[0]  # without the point of a study
    for alternative in re.split(r", or | or |; ", error.fix):
        try:
            fixes = [shlex.split(part) for part in LIST.split(alternative)]
        except ValueError:  # prose
            continue
        if all(map(is_typable, fixes)):
            yield from ([*without(words, {key, *map(name, fix)}), *fix] for fix in fixes)


def is_typable(fix: Sequence[str]) -> bool:
    """Return whether these are words of a command line, and no prose."""
    values = [word for option, word in pairwise(fix) if OPTION.fullmatch(option)]
    return bool(fix) and all(
        (WORD.fullmatch(word) or OPTION.fullmatch(word) or word in values) and not word.endswith("...") for word in fix
    )


def without(words: Sequence[str], names: set[str]) -> Iterator[str]:
    """Yield the words but those of these names; an option is left out with its value."""
    is_value = False
    for word in words:
        is_value = is_value and not (OPTION.fullmatch(word) or WORD.fullmatch(word))
        is_left_out = is_value or name(word) in names
        is_value = is_left_out and bool(OPTION.fullmatch(word))
        if not is_left_out:
            yield word


def name(word: str) -> str:
    return word.lstrip("~+").partition("=")[0]


def follow(call: Callable[[list[str]], Any], words: Sequence[str], error: ConfigError, *, times: int = 3) -> None:
    """Type what a rejection says, and what the next one says: each way must be accepted, after at most so many fixes.

    A fix with a value to fill in, and one in prose, is not typed.
    """
    for typed in retyped(words, error):
        try:
            call(typed)
        except ConfigError as further:
            assert times > 1, f"{typed} is rejected again: {further}"
            assert str(further) != str(error), f"{typed}: the same again"
            follow(call, typed, further, times=times - 1)


def printed(text: str) -> ConfigError:
    """Return the rejection that a program has printed."""
    message = re.search(r"^ConfigError: ([\w.-]+)(.*?)\n  Try: (.*)$", text, re.MULTILINE | re.DOTALL)
    assert message, text
    key, rule, fix = message.groups()
    return ConfigError(key, None, rule, fix)
