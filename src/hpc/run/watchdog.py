"""A watchdog on each rank, so that ranks fail together, soon, and with a reason.

It watches its own main thread, and the other ranks through the store. Nothing here may wait for a file system, a
network or the interpreter's lock without a limit: those are what hangs.
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

from hpc.config.errors import ExitCode
from hpc.run import attempt_log, causes, claim, stacks
from hpc.run.claim import Claim
from hpc.run.guard import Guard
from hpc.run.peers import TURN_SECONDS, Peers
from hpc.run.signals import SignalState, wait_for_signals

POLL_SECONDS = 1.0  # between two looks at the main thread
STEP_END_SECONDS = 3.0  # within which a step should end after a SIGTERM; the scheduler may kill after 5
LAST_WORDS_SECONDS = 3.0  # that a failing rank has for its file, and rank 0 for the others to hear of it
EXIT_SECONDS = 10.0  # that a rank has between its error and its end, before it is ended


class Stopped(Exception):
    """All ranks stop at this step, as they agreed; nothing has failed."""

    def __init__(self, step: int, why: str, outcome: str = "continue") -> None:
        self.step, self.why, self.outcome = step, why, outcome
        super().__init__(f"step {step}: {why}")


class Watchdog:
    """A context around building and fitting, on every rank.

    Args:
        claim: on rank 0; it is released at the end.
        store: that all ranks reach and rank 0 serves; None: this process is alone.
        hang_seconds: without progress for so long, the rank hangs; in the first step twice as long.

    Attributes:
        has_saved: this attempt has published a checkpoint.
        store: of which others make connections of their own (`clone`).
    """

    def __init__(
        self,
        run_dir: Path,
        claim: Claim | None,
        *,
        attempt: int,
        rank: int,
        world_size: int,
        store: Any,
        hang_seconds: float,
        signals: SignalState,
    ) -> None:
        self.has_saved = False
        self._run_dir, self._claim, self._attempt, self._rank = run_dir, claim, attempt, rank
        self._host = socket.gethostname()
        self.store, self._peers = store, Peers(store, world_size) if store else None
        self._hang_seconds, self._signals = hang_seconds, signals
        self._progress: tuple[int | None, str] = None, ""  # step, and what the main thread does
        self._over, self._end_lock = threading.Event(), threading.Lock()
        self._ending_thread = 0
        self._guard = Guard()
        self._threads: list[threading.Thread] = []

    def report_progress(self, step: int, activity: str = "") -> None:
        """Reset the hang timer. Call it at every micro-step, and regularly during other work."""
        self._progress = step, activity

    def report_activity(self, activity: str) -> None:
        """Reset the hang timer during work that is no step; any thread may call it."""
        self._progress = self._progress[0], activity

    def add_store_exchange(self, exchange: Callable[[Any], object]) -> None:
        """Let the thread that listens to the other ranks call this with the store, too, about once a second."""
        if self._peers:
            self._peers.exchanges.append(exchange)

    def __enter__(self) -> Self:
        loops: dict[str, Callable[[], None]] = {"main thread": self._watch_main_thread}
        if peers := self._peers:
            loops["peers"] = lambda: peers.listen(self._over)
        if self._claim:
            loops["claim"] = self._watch_claim
        self._threads = [
            threading.Thread(target=loop, daemon=True, name=f"watchdog: {name}") for name, loop in loops.items()
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error and not isinstance(error, Stopped):
            self.report_failure(error)
        elif self._try_begin_shutdown():
            # Rank 0 takes the store with it, so it leaves last.
            self._wait_and_release_claim(EXIT_SECONDS if self._rank == 0 else 0)

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks and on disk that this rank fails; from now on it has seconds to end.

        To be called by whoever sees the exception first: on its way up it may pass code that waits for other ranks.
        """
        if isinstance(error, Stopped) or not self._try_begin_shutdown():
            return
        # Destructors of process groups wait for ranks that are gone. These limits hold without the interpreter's lock.
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
        signal.alarm(int(2 * EXIT_SECONDS))
        text = causes.describe_error(error)
        self._tell_peers(text)
        stack = "".join(traceback.format_exception(error))
        _run_within(LAST_WORDS_SECONDS, lambda: self._write_cause(text, stack))
        if causes.is_deterministic(error) and not self.has_saved:
            _run_within(LAST_WORDS_SECONDS, lambda: self._write_failed_verdict(f"rank {self._rank}: {text}"))
        self._wait_and_release_claim(LAST_WORDS_SECONDS)

    def _watch_main_thread(self) -> None:
        """End the process when its main thread hangs or another rank has failed. It waits for nothing but its pipe."""
        last, sigterm_time, patience = self._progress, 0.0, 2 * self._hang_seconds
        now, silent_seconds = time.monotonic(), 0.0
        while not self._over.is_set():
            self._guard.extend(patience + EXIT_SECONDS)
            signals = wait_for_signals(self._signals.read_fd, POLL_SECONDS)
            self._signals.handle_launcher_exit()
            last_look, now = now, time.monotonic()
            silent_seconds += min(now - last_look, 2 * POLL_SECONDS)  # the clock goes on while the process is stopped
            if (progress := self._progress) is not last:
                if last[0] not in (None, progress[0]):  # after a step nothing is loaded or compiled any more
                    patience = self._hang_seconds
                last, silent_seconds, sigterm_time = progress, 0.0, 0.0
            if signal.SIGTERM in signals:
                sigterm_time = sigterm_time or now
            if sigterm_time and now - sigterm_time > STEP_END_SECONDS:
                text = f"no step has ended in the {STEP_END_SECONDS:g} s since SIGTERM; {stacks.describe_main_thread()}"
                self._print(text, stacks.format_all_stacks())
                sigterm_time = 0.0
            failure = self._peers.poll_failure() if self._peers else ""
            if failure.startswith("Hang") or silent_seconds > patience:  # each rank reports where it hangs itself
                self._end_process(self._describe_hang(silent_seconds))
            elif failure:
                self._end_process(f"{causes.ENDED}: {failure}")

    def _watch_claim(self) -> None:
        """End the process when this attempt may no longer write; asks the file system."""
        while self._claim and not self._over.wait(claim.BEAT_SECONDS):
            if not self._claim.may_write():
                owner = claim.newest_attempt(self._run_dir)
                why = f"attempt {owner} has taken over" if owner > self._attempt else "its claim was deleted"
                self._end_process(f"Fenced: {why}, attempt {self._attempt} writes no more")

    def _try_begin_shutdown(self) -> bool:
        """Return whether this thread is the first one to end the watchdog, and stop the other threads.

        If another thread was first and ends the process, the main thread waits here for that.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not self._end_lock.acquire(blocking=False):
            if is_main and self._ending_thread != threading.get_ident():
                time.sleep(2 * EXIT_SECONDS)
            return False
        self._ending_thread = threading.get_ident()
        self._over.set()
        with suppress(OSError):
            os.write(self._signals.write_fd, b"\0")
        for thread in self._threads:  # before the interpreter ends, which kills threads where they stand
            if thread is not threading.current_thread():
                thread.join(POLL_SECONDS)
        self._guard.dismiss()
        return True

    def _end_process(self, text: str) -> None:
        """End this process, from a thread, with all stacks on stderr and in the rank's file."""
        stack = stacks.format_all_stacks()  # before other threads end, which the main thread would notice
        if not self._try_begin_shutdown():
            return
        signal.alarm(int(2 * EXIT_SECONDS))  # the kernel's own limit: stderr may be a pipe that nobody reads any more
        self._tell_peers(text)
        self._print(text, stack)
        _run_within(LAST_WORDS_SECONDS, lambda: self._write_cause(text, stack))
        self._wait_and_release_claim(LAST_WORDS_SECONDS)
        _run_within(LAST_WORDS_SECONDS, sys.stdout.flush)
        os._exit(ExitCode.ANOTHER_RANK_FAILED)

    def _describe_hang(self, seconds: float) -> str:
        step, activity = self._progress
        since = "the start" if step is None else f"step {step}"
        lock = stacks.awaited_lock_file()
        where = stacks.describe_main_thread()
        where += f"; if no other process builds an extension there now: rm {lock}" if lock else ""
        return f"Hang: no step for {seconds:.0f} s since {since}{f' ({activity})' if activity else ''}; {where}"

    def _tell_peers(self, text: str) -> None:
        peers = self._peers
        if peers and not text.startswith(causes.ENDED):
            _run_within(LAST_WORDS_SECONDS, lambda: peers.report_failure(self._rank, host=self._host, error=text))

    def _print(self, text: str, stack: str) -> None:
        os.write(2, f"rank {self._rank} on {self._host}: {text}\n{stack}".encode(errors="replace"))

    def _write_cause(self, text: str, stack: str) -> None:
        rank, host = self._rank, self._host
        causes.write_cause(self._run_dir, self._attempt, rank=rank, host=host, error=text, stack=stack)

    def _write_failed_verdict(self, why: str) -> None:
        """Write the verdict that another start would fail, too, unless another attempt has taken over."""
        if claim.newest_attempt(self._run_dir) <= self._attempt:
            step = self._progress[0] or 0
            attempt_log.write_verdict(self._run_dir, self._attempt, step=step, outcome="failed", why=why)

    def _wait_and_release_claim(self, seconds: float) -> None:
        """Wait so long for the other ranks, which would report other errors without this one; release the claim."""
        if peers := self._peers:
            _run_within(seconds + 1, lambda: peers.wait_for_all(seconds))
            if self._rank == 0 and seconds == LAST_WORDS_SECONDS:  # the others wait, too: first let them see all
                time.sleep(2 * TURN_SECONDS)  # as torch prints a page for each rank that asks a store that is gone
        if own_claim := self._claim:
            _run_within(LAST_WORDS_SECONDS, own_claim.release)


def _run_within(seconds: float, function: Callable[[], object]) -> None:
    """Call a function, but go on after so many seconds; its errors are ignored: a worse one is being handled."""

    def quietly() -> None:
        with suppress(Exception):
            function()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
