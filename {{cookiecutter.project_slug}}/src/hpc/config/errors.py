"""Errors of a config or a command line: what was given, what must be, what to type. Printed without a traceback."""

import argparse
import difflib
import errno
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from omegaconf.errors import OmegaConfBaseException

# Control characters, which a terminal obeys, but for line feed and tab; and marks that turn the direction of text.
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str, also: str = "") -> str:
    """Text that may come from anywhere, for a terminal: what it would obey is written out, as `\\x1b`."""
    for mark in also:
        text = text.replace(mark, ascii(mark)[1:-1])
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


class ArgumentParser(argparse.ArgumentParser):
    """Names what is wrong with a command line without sending it to the terminal raw."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message, "\n"))


class Refused(Exception):
    """A mistake told before anything is written: what was asked, the rule, the fix to type."""

    def __init__(self, key: str, value: object, rule: str, fix: str, alone: bool = False) -> None:
        self.key, self.value, self.rule, self.fix = key, value, rule, fix
        self.alone = alone  # only this rank knows
        asked = printable(key if value is None else f"{key}={value}", "\n")
        super().__init__(f"{asked}\n  rule: {printable(rule)}\n  fix:  {printable(fix)}")

    def parts(self) -> list[str | None]:
        """Return key, value, rule and fix as plain data, to be sent to other ranks."""
        return [self.key, None if self.value is None else str(self.value), self.rule, self.fix]

    def __reduce__(self) -> tuple[Any, ...]:
        """Cross process borders whole: a data worker's refusal reaches the screen as it was raised."""
        return type(self), (self.key, self.value, self.rule, self.fix, self.alone)


class Finished(Refused):
    """Nothing is left to do: for a job that the scheduler has started again this is no mistake."""


@contextmanager
def refusals(speaks: bool = True) -> Iterator[None]:
    """Print a refusal on stderr and leave with exit code 2, no traceback. Of ranks that all know it, one speaks."""
    try:
        yield
    except Finished as finished:
        if speaks or finished.alone:
            print(f"{finished.rule} already\nrun directory {printable(str(finished.value))}", flush=True)
        sys.exit(0)
    except (Refused, OmegaConfBaseException) as error:
        refused = error if isinstance(error, Refused) else unusable(error)
        if speaks or refused.alone:
            sys.stderr.write(f"refused: {refused}\n")  # at once: other ranks and srun write into the same log
        sys.exit(2)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        refused = Refused(f"{str(error.filename)[:60]}...", None, "must be shorter to be a file", "another name")
        sys.stderr.write(f"refused: {refused}\n")
        sys.exit(2)


def unusable(error: OmegaConfBaseException) -> Refused:
    """A value of the config that is asked for, and is not there or cannot be resolved."""
    return Refused(error.full_key or "config", None, f"must have a value: {reason(error)}", "see --cfg job")


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """The known word closest to a mistyped one, or `otherwise` when none is close."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), otherwise)


def meant(word: str, known: Iterable[str], prefix: str = "") -> str:
    """What to type instead of a mistyped key."""
    close = nearest(word, known, "")
    return f"{dotted(prefix, close)}=..." if close else "remove it, or see --cfg job for the keys there are"


def reason(error: BaseException) -> str:
    """An error in one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def dotted(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
