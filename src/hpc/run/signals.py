"""Warning signals are noted instead of obeyed: the ranks stop together between two steps. Imported before all else."""

import atexit
import faulthandler
import os
import select
import signal
import stat
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from hpc.system import process

WARNING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
EXIT_SECONDS = 30.0  # that the interpreter has to end
ORPHANED = "the end of the process that started this rank"
INTERRUPTED = "Ctrl-C"


@dataclass
class SignalState:
    """The first warning signal that this process got, and the handlers that note it.

    Attributes:
        signal: its name; None: there was none.
        launcher_pid: pid of the launcher on this node; once it ends, nobody waits for this process. None: none known.
        is_reporting_rank: this rank answers a Ctrl-C, which all ranks of a terminal get.
        ends_by_sigint: see `_end`.
        read_fd: end of a pipe that wakes the watchdog when a signal comes.
        write_fd: its other end.
    """

    signal: str | None = None
    launcher_pid: int | None = None
    is_reporting_rank: bool = False
    ends_by_sigint: bool = False
    read_fd: int = -1
    write_fd: int = -1

    def install_handlers(self) -> None:
        """Become the process's signal handler, also after another one (Lightning's) was installed."""
        for number in WARNING_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, self._note)
        signal.set_wakeup_fd(self.write_fd, warn_on_full_buffer=False)

    def set_interruptible(self, is_training: bool) -> None:
        """Let the first Ctrl-C be a warning while it trains; the second one ends the process in any case.

        Before and after the training there is nothing to save. A job in the background of a shell ignores Ctrl-C.
        """
        new, old = (self._interrupt, signal.default_int_handler)[:: 1 if is_training else -1]
        if signal.getsignal(signal.SIGINT) == old:
            signal.signal(signal.SIGINT, new)

    def handle_launcher_exit(self) -> None:
        """Take the end of the launcher's process for a warning, and drop all output: nobody reads it any more."""
        if self.launcher_pid not in (None, os.getppid()):
            self.launcher_pid, self.signal = None, self.signal or ORPHANED
            _drop_output()

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.signal = self.signal or INTERRUPTED
        if self.is_reporting_rank:
            text = "Ctrl-C: the run stops after this step and saves. Ctrl-C again ends it at once, without saving."
            os.write(2, f"\n{text}\n".encode())

    def _end(self) -> None:
        """End by SIGINT after a Ctrl-C: only then does bash know that the loop around this process is to end, too."""
        if self.ends_by_sigint:
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number).name
        if number == signal.SIGHUP:  # the terminal is closed, and with it the programs that read from a pipe
            _drop_output()


def install_signal_handlers() -> SignalState:
    """Note warning signals from now on, instead of ending, and let SIGQUIT print the stacks of all threads.

    To be called first of all: a signal that comes during the imports counts, too.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGQUIT, all_threads=True, chain=False)
    read_fd, write_fd = os.pipe()
    for descriptor in (read_fd, write_fd):
        os.set_blocking(descriptor, False)
    state = SignalState(read_fd=read_fd, write_fd=write_fd)
    atexit.register(state._end)  # registered first, so that it is called last
    # The destructors of process groups may wait for ever, whatever the outcome was.
    atexit.register(faulthandler.dump_traceback_later, EXIT_SECONDS, exit=True)
    state.install_handlers()
    os.register_at_fork(after_in_child=_reset_in_child)
    return state


def _drop_output() -> None:
    """Drop what this process prints, except into files: whoever reads it is gone, and printing would fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        with suppress(OSError):  # it is closed
            if not stat.S_ISREG(os.fstat(stream).st_mode):
                os.dup2(null, stream)


def _reset_in_child() -> None:
    """Leave signals to the ranks, in a forked child (a data worker): some schedulers signal every process."""
    signal.set_wakeup_fd(-1)  # the parent's pipe
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (*WARNING_SIGNALS[1:], signal.SIGINT):  # a terminal interrupts all its processes
        signal.signal(number, signal.SIG_IGN)


def block_signals_in_worker(worker: int) -> None:
    """Let a data worker go on after a warning, until its rank ends it; for `worker_init_fn`."""
    del worker
    signal.pthread_sigmask(signal.SIG_BLOCK, (*WARNING_SIGNALS, signal.SIGINT))
    threading.Thread(target=_end_with_rank, args=[os.getppid()], daemon=True, name="end with rank").start()


def _end_with_rank(rank_pid: int) -> None:
    """Exit on SIGTERM from the rank: it ends workers that way and waits without a time limit."""
    process.wait_for_signal(signal.SIGTERM, sender=rank_pid, blocked=WARNING_SIGNALS)
    os._exit(0)


def wait_for_signals(read_fd: int, seconds: float) -> set[int]:
    """Return the numbers of signals as soon as one comes; an empty set if none comes within so many seconds."""
    readable, _, _ = select.select([read_fd], [], [], seconds)
    return set(os.read(read_fd, 4096)) if readable else set()
