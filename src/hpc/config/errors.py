"""Errors of a config or a command line: what was given, what must be, what to type; exit codes."""

import argparse
import difflib
import errno
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from omegaconf.errors import OmegaConfBaseException

# Control characters, except line feed and tab, which a terminal obeys; and marks that change the direction of text.
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

MAX_NAMES = 4  # of a list in a message


def make_printable(text: str, also: str = "") -> str:
    """Return text of any origin without control characters: they are written out, as `\\x1b`.

    Args:
        also: further characters to write out.
    """
    for character in also:
        text = text.replace(character, ascii(character)[1:-1])
    return CONTROL_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], text)


class ExitCode(IntEnum):
    """The exit codes of a training process and of its job script."""

    DONE = 0
    FAILED = 1
    REJECTED = 2  # the config or the command line is wrong
    CONTINUE = 85  # saved, to be continued by another job, where the scheduler has no requeue (PBS)
    ANOTHER_RANK_FAILED = 86  # the watchdog has ended this rank


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose error messages hold no control characters of the command line."""

    def error(self, message: str) -> NoReturn:
        super().error(make_printable(message, "\n"))


class ConfigError(Exception):
    """A mistake in a config or on a command line, reported before anything is written.

    The message is a full sentence, and what to type instead::

        ConfigError: data.global_batch_size must be divisible by the number of devices (2); got 63.
          Try: data.global_batch_size=64

    Args:
        key: what is wrong, as it is typed.
        value: what was given; None where that says nothing.
        rule: begins with "must" or "cannot", and its subject is `key`; or a sentence of its own.
        fix: what to type instead.
        only_this_rank: the other ranks do not know of it, so this one prints it.
    """

    def __init__(self, key: str, value: object, rule: str, fix: str, *, only_this_rank: bool = False) -> None:
        self.key, self.value, self.rule, self.fix = key, value, rule, fix
        self.only_this_rank = only_this_rank
        super().__init__(f"{make_printable(_sentence(key, value, rule))}\n  Try: {make_printable(fix)}")

    def parts(self) -> list[str | None]:
        """Return key, value, rule and fix as plain data, to be sent to other ranks."""
        return [self.key, None if self.value is None else str(self.value), self.rule, self.fix]

    def __reduce__(self) -> tuple[Any, ...]:
        """Keep all parts when the error is pickled: that of a data worker reaches the screen as it was raised."""
        make = partial(type(self), only_this_rank=self.only_this_rank)
        return make, (self.key, self.value, self.rule, self.fix)


def _sentence(key: str, value: object, rule: str) -> str:
    """Return what must be and what was given, e.g. "trainer.devices must be at least 1; got 0."."""
    end = "" if rule.endswith((".", "!", "?")) else "."
    key, given = make_printable(key, "\n"), make_printable(str(value), "\n")
    if rule.startswith(("must ", "cannot ")):
        return f"{key} {rule}." if value is None else f"{key} {rule}; got {given}."
    return f"{key}: {rule}{end}" if value is None else f"{key}={given}: {rule}{end}"


class ConfigErrors(ConfigError):
    """Several mistakes of one config, printed together. To whoever handles one error, it is the first of them."""

    def __init__(self, problems: Sequence[ConfigError]) -> None:
        first = problems[0]
        super().__init__(first.key, first.value, first.rule, first.fix, only_this_rank=first.only_this_rank)
        self.problems = tuple(problems)
        self.args = ("\nConfigError: ".join(map(str, problems)),)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)


class RunFinished(ConfigError):
    """The run has nothing left to do. For a job that the scheduler has requeued, this is no mistake."""


class StartFailed(ConfigError):
    """This start met an obstacle that the next one may not meet, such as a taken port. A job starts again after it."""


@contextmanager
def exit_on_config_error(is_reporting_rank: bool = True) -> Iterator[None]:
    """Print a `ConfigError` on stderr, without a traceback, and exit with code 2; after `RunFinished` with 0.

    After `StartFailed` the code is 1, by which a job script knows that another start may succeed.

    Args:
        is_reporting_rank: whether this rank prints an error that all ranks know.
    """
    try:
        yield
    except RunFinished as finished:
        if is_reporting_rank or finished.only_this_rank:
            print(f"{finished.rule} already\nrun directory {make_printable(str(finished.value))}", flush=True)
        sys.exit(ExitCode.DONE)
    except Exception as raised:
        error = _as_config_error(raised)
        if error is None:
            raise
        if is_reporting_rank or error.only_this_rank:
            _print(error)
        sys.exit(ExitCode.FAILED if isinstance(error, StartFailed) else ExitCode.REJECTED)


def _as_config_error(error: Exception) -> ConfigError | None:
    """Return a mistake of the user as `ConfigError`; None for any other error."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = f"{str(error.filename)[:60]}..."
        return ConfigError(name, None, "must be a shorter file name", "a shorter name", only_this_rank=True)
    if "omegaconf.errors" in sys.modules:  # report.py does without: importing it takes long
        from omegaconf.errors import OmegaConfBaseException

        return convert_omegaconf_error(error) if isinstance(error, OmegaConfBaseException) else None
    return None


def convert_omegaconf_error(error: "OmegaConfBaseException") -> ConfigError:
    """Return a `ConfigError` for a value that the program asked for and that is missing or cannot be resolved."""
    return ConfigError(
        error.full_key or "config",
        None,
        f"must have a value: {first_line(error)}",
        "--cfg job, which prints the config with its references",
    )


def raise_problems(problems: Iterable[ConfigError | None]) -> None:
    """Raise all problems as one error; do nothing if there are none. Of a key, only the first one is told."""
    by_key: dict[str, ConfigError] = {}
    for problem in problems:
        for single in getattr(problem, "problems", (problem,)):
            if single is not None and not by_key.keys() & set(keys := single.key.split(", ")):
                by_key |= dict.fromkeys(keys, single)
    if distinct := list(dict.fromkeys(by_key.values())):
        raise distinct[0] if len(distinct) == 1 else ConfigErrors(distinct)


def closest_word(word: str, words: Iterable[str], default: str) -> str:
    """Return the word that is most similar to a mistyped one, or `default` if none is similar."""
    return next(iter(difflib.get_close_matches(word, list(words), n=1)), default)


def suggest_key(key: str, keys: Iterable[str], prefix: str = "") -> str:
    """Return what to type instead of a mistyped key of the section `prefix`."""
    closest = closest_word(key, keys, "")
    return f"{join_key(prefix, closest)}=..." if closest else "remove it; --cfg job shows all keys"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has no message."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def join_names(names: Sequence[str]) -> str:
    """Join the first names of parameters or buffers by commas, and say how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def join_key(prefix: str, key: str) -> str:
    """Return the dotted key of `key` in the section `prefix`, which is "" for the top level."""
    return f"{prefix}.{key}" if prefix else key


def _print(error: ConfigError) -> None:
    sys.stderr.write(f"ConfigError: {error}\n")  # in one write: other ranks and srun write into the same log
