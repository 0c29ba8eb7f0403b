"""Commands and bystanders of the rounds of drawn_neighbours.py.

Commands are forked from a process that has imported the libraries. Files and processes of bystanders must not change.
"""

import ctypes
import hashlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

LIMIT = 150.0  # seconds for the commands of a round; a step takes milliseconds, but the machine may be busy
GONE = 30.0  # seconds within which the children of an ended command must end: a sampler writes its last row
PR_SET_CHILD_SUBREAPER = 36
BYSTANDERS: set[int] = set()  # processes
# The only variables that commands inherit, so that a surrounding job has no effect.
KEPT = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "VIRTUAL_ENV",
    "LD_LIBRARY_PATH",
    "XDG_CONFIG_HOME",
    "XDG_CACHE_HOME",
)


@dataclass
class Command:
    """A command line, run by one process or by several ranks as mpiexec would start them.

    Args:
        hit: a signal that ends it. A training sends it to itself in step `at`, others get it after `at` seconds.
        late: seconds by which it starts after the others.
        patch: code that each of its processes executes first.
    """

    name: str
    words: list[str]
    ranks: int = 1
    environ: dict[str, str] = field(default_factory=dict)
    hit: int = 0
    at: float = 0.0
    late: float = 0.0
    patch: str = ""
    nodes: tuple[int, ...] = ()  # for each rank, a process id on its node; (): all ranks are on this machine
    codes: dict[int, int] = field(default_factory=dict)  # process -> exit code
    log: Path = Path()

    @property
    def code(self) -> int:
        """The first exit code that is not 0, or 0."""
        return next((code for code in self.codes.values() if code), 0)

    @property
    def steps(self) -> bool:
        return self.words[0] == "train.py"

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.codes else ""

    def __str__(self) -> str:
        hit = f", {signal.Signals(self.hit).name} at {self.at:g}" if self.hit else ""
        where = " ".join(
            f"{key}={value}" for key, value in self.environ.items() if key.startswith(("SLURM_J", "PBS_J"))
        )
        return f"{self.name}: {where} {' '.join(self.words)} ({self.ranks} ranks, late {self.late:g} s{hit})"


class Ground:
    """A folder for one round, with bystanders in it. `harmed`: a sentence for each harm that was found."""

    def __init__(self, folder: Path, project: Path) -> None:
        self.folder, self.project = folder, project
        self.harmed: list[str] = []
        self.counts: Counter[str] = Counter()
        self.done: list[Command] = []
        self._others: dict[Path, tuple[str, int]] = {}
        self._listeners: list[socket.socket] = []
        folder.mkdir(parents=True)
        self.bystander = os.fork()
        BYSTANDERS.add(self.bystander)
        if not self.bystander:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(3600)
            os._exit(0)

    def protect(self, folder: Path, names: Sequence[str]) -> None:
        """Write files of another user into a folder, and remember their state."""
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"of somebody else: " + name.encode() + b"\n" * 40)
            self._others[path] = _state(path)

    def occupy(self, port: int) -> None:
        """Start another user's server on a port, which accepts connections and never answers."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return
        listener.listen(64)
        self._listeners.append(listener)

    def run(self, commands: Sequence[Command]) -> None:
        """Run all commands at once, until the last has ended. One that does not end is killed, and counts as harm."""
        alive: dict[int, Command] = {}
        try:
            self._await(commands, alive)
        except BaseException:  # for example Ctrl-C
            for pid in [*alive, self.bystander]:
                os.kill(pid, signal.SIGKILL)
            raise

    def _await(self, commands: Sequence[Command], alive: dict[int, Command]) -> None:
        begun = time.monotonic()
        waiting = sorted(commands, key=lambda command: command.late)
        hits = [command for command in commands if command.hit and not command.steps]
        while waiting or alive:
            now = time.monotonic() - begun
            while waiting and waiting[0].late <= now:
                command = waiting.pop(0)
                self.done.append(command)
                alive |= {self._fork(command, rank): command for rank in range(command.ranks)}
            for command in [command for command in hits if now > command.late + command.at]:
                hits.remove(command)
                for pid in [pid for pid, other in alive.items() if other is command]:
                    os.kill(pid, command.hit)
            for pid in list(alive):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    alive.pop(pid).codes[pid] = os.waitstatus_to_exitcode(status)
            if now > LIMIT:
                for pid, command in alive.items():
                    self.harm("does not end", f"{command.name}: {command.said()[-1500:]}")
                    os.kill(pid, signal.SIGKILL)
                begun = float("inf")
            time.sleep(0.01)

    def harm(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        self.harmed.append(f"{kind}: {what}")

    def expect(self, command: Command, *codes: int) -> bool:
        """Check that a command ended with one of these exit codes and without a traceback. Otherwise note harm."""
        if command.code not in codes:
            self.harm("ended otherwise", f"{command.name}: {command.code} instead of {codes}: {command.said()[-2500:]}")
        elif "Traceback (most" in command.said() and not command.hit:
            self.harm("traceback", f"{command.name}: {command.said()[-2500:]}")
        else:
            return True
        return False

    def close(self) -> None:
        """Check the bystanders, and that no processes and temporary files are left."""
        for listener in self._listeners:
            listener.close()
        for path, state in self._others.items():
            if not path.exists():
                self.harm("deleted a file of another", str(path))
            elif _state(path) != state:
                self.harm("changed a file of another", str(path))
        if os.waitpid(self.bystander, os.WNOHANG)[0]:
            self.harm("ended a process of another", "the bystander")
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
        killed = {str(pid) for command in self.done if command.hit for pid in command.codes}
        for path in self.folder.rglob("*"):
            temporary = path.name.endswith((".part", ".lock", ".new")) or path.name.startswith((".room", ".verdict-"))
            theirs = any(path == other or path in other.parents for other in self._others)
            if temporary and not theirs and not any(pid in path.name for pid in killed):
                self.harm("left a file", str(path))

    def _fork(self, command: Command, rank: int) -> int:
        command.log = self.folder / "logs" / f"{command.name}.log"
        command.log.parent.mkdir(exist_ok=True)
        if pid := os.fork():
            return pid
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # this process has handlers of its own
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT in background jobs
            stream = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            for listener in self._listeners:
                listener.close()
            here = {name: os.environ[name] for name in KEPT if name in os.environ}
            os.environ.clear()
            place = {"PMI_RANK": rank, "PMI_SIZE": command.ranks}
            on_node = (0, 1) if command.nodes else (rank, command.ranks)
            place |= {"MPI_LOCALRANKID": on_node[0], "MPI_LOCALNRANKS": on_node[1]}
            if command.nodes:
                _enter(command.nodes[rank])
            launched = {name: str(value) for name, value in place.items()} if command.ranks > 1 else {}
            os.environ.update(here | {"OMP_NUM_THREADS": "1"} | command.environ | launched)
            os.chdir(self.project)
            if command.words[0] == "bash":
                os.execvp("bash", command.words)
            sys.argv = command.words
            if command.hit and command.steps and rank == command.ranks - 1:
                _hit_itself(command.hit, int(command.at))
            exec(command.patch, {"__name__": "patch"})
            runpy.run_path(str(self.project / command.words[0]), run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def adopt() -> None:
    """Make orphaned processes of commands children of this process, so that they are found."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> dict[int, str]:
    """Return the process id and command line of each child that has not ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else ["", "0"]
            if int(fields[1]) == os.getpid() and fields[0] != "Z" and int(entry.name) not in BYSTANDERS:
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
        except OSError:
            continue
    return found


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _enter(pid: int) -> None:
    """Move this process into the namespaces of another process: network, hostname, IPC and mounts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for space in ("net", "uts", "ipc", "mnt"):
        descriptor = os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {space} of {pid}")
        os.close(descriptor)


def _hit_itself(number: int, step: int) -> None:
    """Make this process send itself a signal after this number of steps."""
    from hpc.resume.resume import Resume

    before = Resume.on_train_batch_end

    def on_train_batch_end(self, trainer, *others) -> None:
        before(self, trainer, *others)
        if trainer.global_step == step:
            os.kill(os.getpid(), number)

    Resume.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign]


def _state(path: Path) -> tuple[str, int]:
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mode
