"""Fork ranks from a process that has imported the libraries, and collect their exit codes."""

import ctypes
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

LIMIT = 90.0  # seconds for one start, after which it counts as hung


def placed(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that MPICH's mpiexec sets."""
    place = {"PMI_RANK": rank, "PMI_SIZE": ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": ranks}
    return {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def fork(project: Path, log: Path, words: list[str], environ: dict[str, str], patch: str) -> int:
    """Fork a rank, and return its process id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with_parent()
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        os.environ.clear()
        os.environ |= environ
        os.chdir(project)
        sys.argv = ["train.py", *words]
        exec(patch, {"__name__": "patch"})  # the module of its classes
        runpy.run_path(str(project / "train.py"), run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int]) -> list[int]:
    """Return the exit codes of ranks.

    Raises:
        TimeoutError: some ranks did not end. They have printed their stacks (SIGQUIT) and were killed.
    """
    codes: dict[int, int] = {}
    limit = time.monotonic() + LIMIT
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit:
            left = [pid for pid in pids if pid not in codes]
            for sent in (signal.SIGQUIT, signal.SIGKILL):
                for pid in left:
                    os.kill(pid, sent)
                time.sleep(0.5)
            for pid in left:
                os.waitpid(pid, 0)
            raise TimeoutError(f"ranks {[pids.index(pid) for pid in left]} did not end within {LIMIT:g} s")
        time.sleep(0.01)
    return [codes[pid] for pid in pids]
