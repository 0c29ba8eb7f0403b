"""A program whose ranks train together, from its first line to its exit code."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ

from hpc.config.errors import exit_on_config_error
from hpc.launch import placement
from hpc.launch.placement import Placement
from hpc.run.signals import Warned, listen


@dataclass(frozen=True)
class Program:
    """This process.

    Attributes:
        words: what was typed after the program's name.
        place: where it stands among the ranks.
        signals: the first warning signal that it got.
    """

    words: list[str]
    place: Placement
    signals: Warned

    @property
    def is_reporting_rank(self) -> bool:
        """Whether this is the rank that prints what all ranks know."""
        return self.signals.speaks


@contextmanager
def program() -> Iterator[Program]:
    """Listen to signals, find this process's place, and end a mistake with one message and exit code 2.

    To be entered before the heavy imports: a signal that comes meanwhile would end the process.
    """
    gc.disable()  # until the libraries are imported: to look for garbage meanwhile takes a fifth of that time
    signals = listen()
    with exit_on_config_error():
        place = placement.read_placement(environ)
    signals.speaks = placement.is_reporting_rank(place, environ)
    with exit_on_config_error(signals.speaks):
        yield Program(sys.argv[1:], place, signals)
