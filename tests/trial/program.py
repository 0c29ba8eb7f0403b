"""Programs of a baked project, as ranks that are forked from this process, which has imported the libraries."""

import ctypes
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trial.patience import Patience
from trial.strike import OUTSIDE, Strike, Watch

DEADLINE = 150.0  # seconds; a step takes milliseconds, but the machine may be busy
# The only variables that programs inherit, so that a surrounding job has no effect.
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
FIXED = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "XDG_CONFIG_HOME": os.devnull}
BASH = "bash"
# Ranks agree at every step instead of once a second, so that a short run stops where it is struck.
AT_ONCE = "from hpc.resume import agreement; agreement.INTERVAL_SECONDS = 0\n"
# Allow `_target_` on the command line.
TYPED = "import re; from hpc.config import typed_words; typed_words.CODE_KEYS = re.compile('(?!)')\n"


@dataclass
class Program:
    """A command line of a project, run by one process or by ranks as MPICH's mpiexec would start them.

    Attributes:
        words: the program, as train.py, and its words. A program `BASH` is bash, without Python.
        nodes: for each rank, a process on its node; (): all ranks are on this machine.
        deadline: seconds, without those in which it waits for a processor, after which it has hung.
        late: seconds by which it starts after others that are run with it.
        patch: code that each rank executes first.
        is_doomed: the patch may kill it.
        codes: the exit codes of its ranks, once it has ended.
        hung: the ranks that did not end by themselves.
    """

    project: Path
    words: list[str]
    log: Path
    ranks: int = 1
    environ: dict[str, str] = field(default_factory=dict)
    nodes: tuple[int, ...] = ()
    deadline: float = DEADLINE
    late: float = 0.0
    patch: str = ""
    strike: Strike | None = None
    is_doomed: bool = False
    codes: list[int] = field(default_factory=list)
    hung: list[int] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begin = 0

    @property
    def name(self) -> str:
        return self.log.stem

    @property
    def code(self) -> int:
        """The first exit code that is not 0, or 0."""
        return next((code for code in self.codes if code), 0)

    @property
    def may_die(self) -> bool:
        """Whether something may end it before it has done what it is to do."""
        return self.is_doomed or self.strike is not None

    @property
    def was_struck(self) -> bool:
        return self._record.exists()

    @property
    def _record(self) -> Path:
        return self.log.with_name(f"{self.log.name}-{self.pids[0]}.struck")

    def said(self) -> str:
        """Return what this start has printed."""
        return self.log.read_bytes()[self._begin :].decode(errors="replace") if self.codes else ""

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as stream:
            stream.write(f"--- {' '.join(self.words)} {self.strike or ''}\n")
            self._begin = stream.tell()
        port = free_port()
        self.pids = []
        for rank in range(self.ranks):
            self.pids.append(fork(lambda rank=rank: self._enter(rank, port), self.log))
        self.patience = Patience(self.pids, self.deadline)

    def _enter(self, rank: int, port: int) -> None:
        """Become a rank."""
        here = {name: os.environ[name] for name in KEPT if name in os.environ}
        os.environ.clear()
        place = placed(rank, self.ranks, port, is_alone=bool(self.nodes)) if self.ranks > 1 else {}
        os.environ.update(here | FIXED | place | self.environ)
        if self.nodes:
            enter_node(self.nodes[rank])
        os.chdir(self.project)
        if self.words[0] == BASH:
            os.execvp(BASH, self.words)
        sys.path[:0] = [folder for folder in (str(self.project), f"{self.project}/src") if folder not in sys.path]
        sys.argv = self.words
        exec(self.patch, {"__name__": "patch"})  # the module of its classes
        strike = self.strike
        if strike and strike.place != OUTSIDE and strike.rank % self.ranks == rank:
            pid = self.pids[0] if self.pids else os.getpid()
            Watch(strike, self.log.with_name(f"{self.log.name}-{pid}.struck"))
        runpy.run_path(str(self.project / self.words[0]), run_name="__main__")

    def __str__(self) -> str:
        place = " ".join(
            f"{key}={value}" for key, value in self.environ.items() if key.startswith(("SLURM_J", "PBS_J"))
        )
        return f"{self.name}: {place} {' '.join(self.words)} ({self.ranks} ranks, late {self.late:g} s, {self.strike})"


def run(*programs: Program) -> None:
    """Run programs at once, until the last has ended; one that exceeds its deadline prints its stacks and is killed."""
    began = time.monotonic()
    waiting = sorted(programs, key=lambda program: program.late)
    alive: dict[int, tuple[Program, int]] = {}
    codes: dict[int, int] = {}
    outside = [program for program in programs if program.strike and program.strike.place == OUTSIDE]
    try:
        while waiting or alive:
            now = time.monotonic() - began
            while waiting and waiting[0].late <= now:
                program = waiting.pop(0)
                program.start()
                alive |= {pid: (program, rank) for rank, pid in enumerate(program.pids)}
            for program in [program for program in outside if now > program.late + program.strike.seconds]:
                outside.remove(program)
                send([pid for pid, (other, _) in alive.items() if other is program], program.strike.deed)
            for pid in list(alive):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    alive.pop(pid)
                    codes[pid] = os.waitstatus_to_exitcode(status)
            late = {pid: who for pid, who in alive.items() if who[0].patience.is_over()}
            for pid, (program, rank) in late.items():
                program.hung.append(rank)
                codes[pid] = end(pid)
                alive.pop(pid)
            time.sleep(0.005)
    except BaseException:  # for example Ctrl-C
        send(list(alive), "SIGKILL")
        raise
    for program in programs:
        program.codes = [codes[pid] for pid in program.pids]


def ended(pid: int, deadline: float) -> int | None:
    """Wait for a forked process. Return its exit code, or None if it has not ended by itself, and was killed."""
    patience = Patience([pid], deadline)
    while not patience.is_over():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    end(pid)
    return None


def fork(body: Callable[[], object], out: Path, err: Path | None = None) -> int:
    """Fork a process that calls `body` and ends as a program would, with its output in files. Return its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # this process may have handlers of its own
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores SIGINT in background jobs
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in ((1, out), (2, err or out)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        # Line buffering: otherwise the lines of two ranks would mix.
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        body()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(ended.code + "\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def placed(rank: int, ranks: int, port: int, *, is_alone: bool = False) -> dict[str, str]:
    """Return the variables that MPICH's mpiexec sets; `is_alone`: each rank is on a node of its own."""
    place = {"PMI_RANK": rank, "PMI_SIZE": ranks, "MASTER_PORT": port}
    place |= {"MPI_LOCALRANKID": 0 if is_alone else rank, "MPI_LOCALNRANKS": 1 if is_alone else ranks}
    return {name: str(value) for name, value in place.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_node(pid: int) -> None:
    """Move this process into the namespaces of another process: network, hostname, IPC and mounts."""
    libc = ctypes.CDLL(None, use_errno=True)
    for space in ("net", "uts", "ipc", "mnt"):
        descriptor = os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {space} of {pid}")
        os.close(descriptor)


def send(pids: Sequence[int], name: str) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, name))


def end(pid: int) -> int:
    """Let a process print its stacks, kill it, and return its exit code."""
    send([pid], "SIGQUIT")
    time.sleep(0.5)
    send([pid], "SIGKILL")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
