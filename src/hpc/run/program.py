"""This process, one of those that train together, from its first line to its exit code."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ

from hpc.config import signatures
from hpc.config.errors import exit_on_config_error
from hpc.launch import placement
from hpc.launch.placement import Placement
from hpc.run.signals import SignalState, install_signal_handlers


@dataclass(frozen=True)
class RankProcess:
    """This process, as one of the ranks of a run.

    Attributes:
        arguments: what was typed after the program's name.
        place: where it stands among the ranks.
        signals: the first warning signal that it got.
    """

    arguments: list[str]
    place: Placement
    signals: SignalState

    @property
    def is_reporting_rank(self) -> bool:
        """Return True for the rank that prints the messages all ranks share."""
        return self.signals.is_reporting_rank


@contextmanager
def rank_process() -> Iterator[RankProcess]:
    """Listen to signals, find this process's place, and end a mistake with one message and exit code 2.

    To be entered before the large imports: a signal that comes during these would end the process.
    """
    gc.disable()  # until the libraries are imported: collecting garbage would take a fifth of that time
    signatures.is_training = True
    # On CPU, waiting threads must yield early: spinning made a step ten times slower on a shared machine. torch reads
    # this when it is imported, which the check of the config may do.
    environ.setdefault("GOMP_SPINCOUNT", "1000")
    signals = install_signal_handlers()
    with exit_on_config_error():
        place = placement.read_placement(environ)
    signals.is_reporting_rank = placement.is_reporting_rank(place, environ)
    with exit_on_config_error(signals.is_reporting_rank):
        yield RankProcess(sys.argv[1:], place, signals)
