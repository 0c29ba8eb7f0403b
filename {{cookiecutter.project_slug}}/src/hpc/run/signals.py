"""Warning signals are noted, not obeyed: the ranks stop together between two steps. Imported before all else."""

import atexit
import faulthandler
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass
from types import FrameType

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LEAVE = 30.0  # seconds that the interpreter has to end
ORPHANED = "the end of what started this rank"
INTERRUPTED = "Ctrl-C"


@dataclass
class Warned:
    """The first warning that this process got, by name. `reads`, `writes`: a pipe that wakes the watch.

    `parent`: the launcher's process on this node, without which nobody will hear of this one's end; None: no matter.
    `speaks`: this rank answers a Ctrl-C, which all ranks of a terminal get. `ends_interrupted`: see `_end`.
    """

    signal: str | None = None
    parent: int | None = None
    speaks: bool = False
    ends_interrupted: bool = False
    reads: int = -1
    writes: int = -1

    def install(self) -> None:
        """Be the process's handler, also after somebody else (Lightning) has become it."""
        for number in WARNINGS:
            signal.signal(number, self._note)
        signal.set_wakeup_fd(self.writes, warn_on_full_buffer=False)

    def interruptible(self, trains: bool) -> None:
        """While it trains, the first Ctrl-C is a warning and the second one ends the process, whatever it does.

        Before and afterwards there is nothing to save. Jobs that a shell has put into the background ignore it.
        """
        new, old = (self._interrupt, signal.default_int_handler)[:: 1 if trains else -1]
        if signal.getsignal(signal.SIGINT) == old:
            signal.signal(signal.SIGINT, new)

    def look(self) -> None:
        """Is the launcher's process still there? Its end is a warning; nobody reads the output any more."""
        if self.parent not in (None, os.getppid()):
            self.parent, self.signal = None, self.signal or ORPHANED
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(nowhere, stream)

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.signal = self.signal or INTERRUPTED
        if self.speaks:
            os.write(2, b"\nCtrl-C: stops after this step and saves; once more ends at once, and saves nothing\n")

    def _end(self) -> None:
        """Only of a process that an interrupt has ended does bash know that the loop around it is to end, too."""
        if self.ends_interrupted:
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name


def listen() -> Warned:
    """From now on a warning signal is noted instead of ending the process, and SIGQUIT shows the stacks of all threads.

    To be called first of all: a signal that comes during the imports counts, too.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    warned = Warned(reads=reads, writes=writes)
    atexit.register(warned._end)  # first, so that it is done last
    # The destructors of process groups may wait for ever, whatever the outcome was.
    atexit.register(faulthandler.dump_traceback_later, LEAVE, exit=True)
    warned.install()
    os.register_at_fork(after_in_child=_of_no_concern)
    return warned


def _of_no_concern() -> None:
    """In a forked child (a data worker): some schedulers signal every process, and the parent's pipe is not ours."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):  # a terminal interrupts all its processes
        signal.signal(number, signal.SIG_IGN)


def deaf(worker: int) -> None:
    """A data worker's `worker_init_fn`: it works on while its rank comes to the end of the step, and ends with it."""
    del worker
    signal.pthread_sigmask(signal.SIG_BLOCK, (*WARNINGS, signal.SIGINT))
    threading.Thread(target=_ends_with, args=[os.getppid()], daemon=True, name="deaf").start()


def _ends_with(rank: int) -> None:
    """A SIGTERM from the rank itself is no warning: so it ends its workers, and then waits for them without a limit."""
    while (heard := signal.sigwaitinfo(WARNINGS)).si_pid != rank or heard.si_signo != signal.SIGTERM:
        pass
    os._exit(0)


def woken(pipe: int, seconds: float) -> set[int]:
    """Signals that have come, as soon as one does; nothing after so many seconds."""
    readable, _, _ = select.select([pipe], [], [], seconds)
    return set(os.read(pipe, 4096)) if readable else set()
