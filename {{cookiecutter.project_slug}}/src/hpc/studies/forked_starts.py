"""Start train.py as ranks that are forked from this process, so that the libraries are imported once."""

import importlib
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc.config.project import PROJECT, SOURCES
from hpc.launch import placement

LIBRARIES = ("lightning.pytorch.callbacks", "torch.distributed.checkpoint", "torch.utils.tensorboard", "torchmetrics")
# Variables that make a process one of the ranks of a launch. This shell may be a task of srun.
LAUNCHER_VARIABLES = {name for names in placement.LAUNCHERS.values() for name in names}
POLL_SECONDS = 0.05


def start(arguments: Sequence[str], *, num_ranks: int, log: Path, max_seconds: float) -> int:
    """Run train.py, or `-m module`, with some arguments. Return its exit code; what it prints is added to a log."""
    for library in LIBRARIES:
        importlib.import_module(library)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sys.stdout.flush()
    pids = [_fork(arguments, rank=rank, num_ranks=num_ranks, port=port, log=log) for rank in range(num_ranks)]
    try:
        return _wait(pids, max_seconds, log)
    finally:
        for pid in pids:  # workers may outlive the rank that started them
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _wait(pids: list[int], max_seconds: float, log: Path) -> int:
    codes: dict[int, int] = {}
    limit = time.monotonic() + max_seconds
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > limit:
            with log.open("a") as file:
                file.write(f"\nError: it did not end within {max_seconds:g} s. A smaller network ends sooner\n")
            return 1
        time.sleep(POLL_SECONDS)
    return next((code for code in codes.values() if code), 0)


def _fork(arguments: Sequence[str], *, rank: int, num_ranks: int, port: int, log: Path) -> int:
    """Fork one rank, and return its process id, which is that of its process group, too."""
    if pid := os.fork():
        with suppress(PermissionError, ProcessLookupError):  # it may have done so itself
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setsid() if os.getpgid(0) != os.getpid() else None
        stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        for name in [name for name in os.environ if name in LAUNCHER_VARIABLES or name.startswith("SLURM_STEP")]:
            del os.environ[name]
        if num_ranks > 1:  # as MPICH's mpiexec says it
            place = {"PMI_RANK": rank, "PMI_SIZE": num_ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": num_ranks}
            os.environ |= {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}
        _run(arguments, num_ranks)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(arguments: Sequence[str], num_ranks: int) -> None:
    import torch

    torch.set_num_threads(placement.num_usable_cores(num_ranks, os.environ))
    os.chdir(PROJECT)
    sys.path[:0] = [str(SOURCES), str(PROJECT)]
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(str(PROJECT / arguments[0]), run_name="__main__")
