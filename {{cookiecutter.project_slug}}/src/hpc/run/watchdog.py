"""Ranks fail together and soon, and say why: each watches its own main thread, and the others through the store.

Nothing here may wait for a file system, a network or the interpreter's lock without a limit: those are what hangs.
"""

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hpc.config.exit_codes import ExitCode
from hpc.run import causes, claim, directory, stacks
from hpc.run.causes import deterministic
from hpc.run.claim import Claim
from hpc.run.peers import Peers
from hpc.run.signals import Warned as Warned
from hpc.run.signals import deaf as deaf
from hpc.run.signals import listen as listen
from hpc.run.signals import woken

LOOK = 1.0  # seconds between two looks at the main thread
NO_BOUNDARY = 3.0  # seconds after a SIGTERM; the scheduler may kill after 5
LAST_WORDS = 3.0  # seconds that a dying rank has for its file, and rank 0 for the others to hear of it
LEAVE = 10.0  # seconds that a rank has between its error and its end, before it is ended


class Stopped(Exception):
    """All ranks stop at this step, as they agreed; nothing has failed."""

    def __init__(self, step: int, why: str, outcome: str = "continue") -> None:
        self.step, self.why, self.outcome = step, why, outcome
        super().__init__(f"step {step}: {why}")


class Watch:
    """Around building and fitting, on every rank. `saved`: this attempt has published a checkpoint.

    Args:
        claim: on rank 0; it is released at the end.
        store: that all ranks reach and rank 0 serves; None: this process is alone.
        hang_seconds: without `progress` for so long, the rank hangs; in the first step twice as long.
    """

    def __init__(
        self,
        run_dir: Path,
        claim: Claim | None,
        attempt: int,
        rank: int,
        world_size: int,
        store: Any,
        hang_seconds: float,
        warned: Warned,
    ) -> None:
        self.saved = False
        self._run_dir, self._claim, self._attempt, self._rank = run_dir, claim, attempt, rank
        self._host = socket.gethostname()
        self._peers = Peers(store, world_size) if store else None
        self._hang_seconds, self._warned = hang_seconds, warned
        self._at: tuple[int, str] | None = None
        self._over, self._end = threading.Event(), threading.Lock()
        self._ends = 0  # the thread that does
        self._threads: list[threading.Thread] = []

    def progress(self, step: int, doing: str = "") -> None:
        """The main thread moves on: to be called at every micro-step, and now and then where there are no steps."""
        self._at = (step, doing)

    def converse(self, turn: Callable[[Any], object]) -> None:
        """Let the thread that hears the others do this as well, with the store, about once a second."""
        if self._peers:
            self._peers.turn = turn

    def __enter__(self) -> Self:
        jobs: dict[str, Callable[[], None]] = {"look": self._look}
        if self._peers:
            jobs["hear"] = lambda: self._peers and self._peers.hear(self._over)
        if self._claim:
            jobs["claim"] = self._owns
        self._threads = [threading.Thread(target=do, daemon=True, name=f"watch: {name}") for name, do in jobs.items()]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error and not isinstance(error, Stopped):
            self.fails(error)
        elif self._ending():
            faulthandler.cancel_dump_traceback_later()
            self._goodbye(LEAVE if self._rank == 0 else 0)  # it takes the store with it, so it leaves last

    def fails(self, error: BaseException) -> None:
        """Tell the others and the report that this rank leaves with an exception; from now on it has seconds to do so.

        To be called by whoever sees it first: on its way up it may pass code that waits for the other ranks.
        """
        if isinstance(error, Stopped) or not self._ending():
            return
        # Destructors of process groups wait for ranks that are gone. These limits hold without the interpreter's lock.
        faulthandler.dump_traceback_later(LEAVE, exit=True)
        signal.alarm(int(2 * LEAVE))
        said = _line(error)
        self._tell(said)
        stack = "".join(traceback.format_exception(error))
        _within(LAST_WORDS, lambda: self._note(said, stack))
        if deterministic(error) and not self.saved:
            _within(LAST_WORDS, lambda: self._in_vain(f"rank {self._rank}: {said}"))
        self._goodbye(LAST_WORDS)

    def _look(self) -> None:
        """The thread that ends the process. It waits for nothing but its pipe."""
        known, since, told_to_end, patience = self._at, time.monotonic(), 0.0, 2 * self._hang_seconds
        while not self._over.is_set():
            # Were the interpreter's lock never given back, this thread could not run either. This one can.
            faulthandler.dump_traceback_later(patience + LEAVE, exit=True)
            signals = woken(self._warned.reads, LOOK)
            self._warned.look()
            now = time.monotonic()
            if (at := self._at) is not known:
                if at and known and at[0] != known[0]:  # a step is done: nothing has to be loaded or compiled any more
                    patience = self._hang_seconds
                known, since, told_to_end = at, now, 0.0
            if signal.SIGTERM in signals:
                told_to_end = told_to_end or now
            if told_to_end and now - told_to_end > NO_BOUNDARY:
                said = f"no step has ended in the {NO_BOUNDARY:g} s since SIGTERM; {stacks.where()}"
                self._show(said, stacks.everywhere())
                told_to_end = 0.0
            news = self._peers.news() if self._peers else ""
            if news.startswith("Hang") or now - since > patience:  # whoever saw it first: each says where it is itself
                self._leave(self._hang(now - since))
            elif news:
                self._leave(f"{causes.ENDED}: {news}")

    def _owns(self) -> None:
        """The thread that asks the file system whether this attempt may still write."""
        while self._claim and not self._over.wait(claim.BEAT):
            if not self._claim.mine():
                owner = claim.newest(self._run_dir)
                why = f"attempt {owner} has taken over" if owner > self._attempt else "its claim was deleted"
                self._leave(f"Fenced: {why}, attempt {self._attempt} writes no more")

    def _ending(self) -> bool:
        """Is this thread the first that ends the watch? Where the watch was, the main thread has nothing left to do."""
        main = threading.current_thread() is threading.main_thread()
        if not self._end.acquire(blocking=False):
            if main and self._ends != threading.get_ident():
                time.sleep(2 * LEAVE)
            return False
        self._ends = threading.get_ident()
        self._over.set()
        with suppress(OSError):
            os.write(self._warned.writes, b"\0")
        for thread in self._threads:  # before the interpreter ends, which kills threads where they stand
            if thread is not threading.current_thread():
                thread.join(LOOK)
        return True

    def _leave(self, said: str) -> None:
        """End this process, from a thread, with all stacks on stderr and in the rank's file."""
        stack = stacks.everywhere()  # before others end: the main thread would see that, too
        if not self._ending():
            return
        signal.alarm(int(2 * LEAVE))  # the kernel's own limit: stderr may be a pipe that nobody reads any more
        self._tell(said)
        self._show(said, stack)
        _within(LAST_WORDS, lambda: self._note(said, stack))
        self._goodbye(LAST_WORDS)
        _within(LAST_WORDS, sys.stdout.flush)
        os._exit(ExitCode.ANOTHER_RANK_FAILED)

    def _hang(self, seconds: float) -> str:
        step, doing = self._at or (None, "")
        since = "the start" if step is None else f"step {step}"
        lock = stacks.lock()
        where = stacks.where() + (f"; if no other process builds an extension there now: rm {lock}" if lock else "")
        return f"Hang: no step for {seconds:.0f} s since {since}{f' ({doing})' if doing else ''}; {where}"

    def _tell(self, said: str) -> None:
        peers = self._peers
        if peers and not said.startswith(causes.ENDED):
            _within(LAST_WORDS, lambda: peers.tell(self._rank, self._host, said))

    def _show(self, said: str, stack: str) -> None:
        os.write(2, f"rank {self._rank} on {self._host}: {said}\n{stack}".encode(errors="replace"))

    def _note(self, said: str, stack: str) -> None:
        causes.note(self._run_dir, self._attempt, self._rank, self._host, said, stack)

    def _in_vain(self, why: str) -> None:
        """The verdict that the job need not start again, unless another attempt has the directory by now."""
        if claim.newest(self._run_dir) <= self._attempt:
            directory.verdict(self._run_dir, self._attempt, self._at[0] if self._at else 0, "failed", why)

    def _goodbye(self, seconds: float) -> None:
        """Wait so long for the others, who would fail in other words, were this rank gone."""
        if peers := self._peers:
            _within(seconds + 1, lambda: peers.leave(seconds))
        if held := self._claim:
            _within(LAST_WORDS, held.release)


def _within(seconds: float, do: Callable[[], object]) -> None:
    """Do it, but go on after so many seconds, done or not; what fails here fails on top of something worse."""

    def quietly() -> None:
        with suppress(Exception):
            do()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)


def _line(error: BaseException) -> str:
    """`Type: message`, the first line of it."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
