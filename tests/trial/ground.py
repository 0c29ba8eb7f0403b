"""The ground on which programs run: files, processes and ports of others, none of which a program may touch.

A canary is a file that nothing but an executed input would make.
"""

import ctypes
import hashlib
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from trial import program
from trial.program import Program

GONE = 30.0  # seconds within which the children of an ended program must end: a sampler writes its last row
PR_SET_CHILD_SUBREAPER = 36
BYSTANDERS: set[int] = set()  # processes
TEMPORARY = (".part", ".lock", ".new")

Facts = dict[str, tuple[int, ...]]


class Ground:
    """A folder for one trial. `harmed`: a sentence for each harm that was found; `counts`: how many of each kind."""

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder, self.project = folder, project
        self.harmed: list[str] = []
        self.counts: Counter[str] = Counter()
        self.done: list[Program] = []
        self.canary = folder / "canary"
        self._others: dict[Path, tuple[str, int]] = {}
        self._listeners: list[socket.socket] = []
        self._watched: list[tuple[Sequence[Path], Path, frozenset[str], Facts]] = []
        self.bystander = 0
        folder.mkdir(parents=True)

    def stand_by(self) -> None:
        """Start another's process."""
        self.bystander = os.fork()
        BYSTANDERS.add(self.bystander)
        if not self.bystander:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            program.die_with_parent()
            time.sleep(3600)
            os._exit(0)

    def protect(self, folder: Path, names: Iterable[str]) -> None:
        """Write files of another user into a folder, and remember their state."""
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"of somebody else: " + name.encode() + b"\n" * 40)
            self._others[path] = _state(path)

    def names_of_others(self, run_dir: Path) -> re.Pattern[str]:
        """Return a pattern of the files below a run directory that others have put there, other runs among them."""
        words = [word.partition("=") for one in self.done for word in one.words]
        runs = {Path(value) for key, _, value in words if key == "run_dir"} - {run_dir}
        places = [path.relative_to(run_dir) for path in (*self._others, *runs) if path.is_relative_to(run_dir)]
        return re.compile("|".join(f"^{re.escape(str(place))}(/|$)" for place in places) or "(?!)")

    def watch(self, folders: Sequence[Path], *, but: Path, names: Iterable[str] = ()) -> None:
        """Remember all files below these folders, except below `but`, and below folders of these names."""
        where = (folders, but, frozenset(names))
        self._watched.append((*where, _facts(*where)))

    def occupy(self, port: int) -> None:
        """Start another user's server on a port, which accepts connections and never answers."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return
        listener.listen(64)
        os.set_inheritable(listener.fileno(), False)
        self._listeners.append(listener)

    def run(self, *programs: Program) -> None:
        """Run all programs at once, until the last has ended. One that does not end is killed, and counts as harm."""
        self.done += programs
        program.run(*programs)
        for one in programs:
            for rank in one.hung:
                self.harm("does not end", f"{one.name}, rank {rank}: {one.said()[-1500:]}")

    def harm(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self.harmed.append(f"{kind}: {what}")

    def expect(self, one: Program, *codes: int) -> bool:
        """Check that a program ended with one of these exit codes and without a traceback. Otherwise note harm."""
        if one.code not in codes:
            self.harm("ended otherwise", f"{one.name}: {one.code} instead of {codes}: {one.said()[-2500:]}")
        elif "Traceback (most" in one.said() and not one.may_die:
            self.harm("traceback", f"{one.name}: {one.said()[-2500:]}")
        else:
            return True
        return False

    def close(self) -> None:
        """Note harm to files and processes of others, and what programs have left behind."""
        self._close_files()
        for listener in self._listeners:
            listener.close()
        if self.bystander:
            self._close_processes()
        if self.canary.exists():
            self.harm("executed", str(self.canary))

    def _close_files(self) -> None:
        for path, before in self._others.items():
            if not path.exists():
                self.harm("deleted a file of another", str(path))
            elif _state(path) != before:
                self.harm("changed a file of another", str(path))
        for *where, before in self._watched:
            if (after := _facts(*where)) != before:
                self.harm("written outside", str(sorted(set(before.items()) ^ set(after.items()))))

    def _close_processes(self) -> None:
        if os.waitpid(self.bystander, os.WNOHANG) != (0, 0):
            self.harm("ended a process of another", str(self.bystander))
        else:
            os.kill(self.bystander, signal.SIGKILL)
            os.waitpid(self.bystander, 0)
        BYSTANDERS.discard(self.bystander)
        limit = time.monotonic() + GONE
        while (left := children()) and time.monotonic() < limit:
            _reap()
            time.sleep(0.02)
        for pid, name in left.items():
            self.harm("left a process", f"{pid} {name}")
            os.kill(pid, signal.SIGKILL)
        _reap()
        killed = {str(pid) for one in self.done if one.may_die for pid in one.pids}
        for path in self.folder.rglob("*"):
            is_temporary = path.name.endswith(TEMPORARY) or path.name.startswith((".room", ".verdict-"))
            theirs = any(path == other or path in other.parents for other in self._others)
            if is_temporary and not theirs and not any(pid in path.name for pid in killed):
                self.harm("left a file", str(path))


def adopt() -> None:
    """Make orphaned processes of programs children of this process, so that they are found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> dict[int, str]:
    """Return the process id and command line of each child that has not ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else ["", "0"]
            if int(fields[1]) == os.getpid() and fields[0] != "Z" and int(entry.name) not in BYSTANDERS:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
    return found


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _state(path: Path) -> tuple[str, int]:
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode


def _facts(folders: Sequence[Path], but: Path, names: frozenset[str]) -> Facts:
    """Return mode, size and time of all files, except those below `but` and below folders of these names."""
    seen: Facts = {}
    for top in folders:
        for folder, below, files in os.walk(top):
            below[:] = [name for name in below if Path(folder, name) != but and name not in names]
            for name in [*below, *files]:
                facts = os.lstat(os.path.join(folder, name))
                time_ns = facts.st_mtime_ns if name in files else 0
                seen[os.path.join(folder, name)] = (facts.st_mode, facts.st_size, time_ns)
    return seen
