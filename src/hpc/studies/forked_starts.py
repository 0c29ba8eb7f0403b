"""Starts of the project's programs as ranks of one node, each forked from a process that has imported the libraries.

Importing them takes a start most of its time. Where forking after imports is not safe (macOS), each rank imports them.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hpc.config.project import PROJECT, SOURCES, child_environment
from hpc.launch.placement import LAUNCHERS

LIBRARIES = ["lightning.pytorch.callbacks", "torch.distributed.checkpoint", "torch.utils.tensorboard", "torchmetrics"]
LIBRARIES += ["hydra.core.override_parser.overrides_parser", "torchdata.stateful_dataloader"]
GRACE_SECONDS = 30.0  # in which the other ranks end once one has failed
POLL_SECONDS = 0.05
# Variables that make a process one of the ranks of a launch. This shell may be a task of srun.
LAUNCHER_VARIABLES = {name for names in LAUNCHERS.values() for name in names}


class ForkedStarts:
    """Starts programs, one after another.

    Args:
        limit_seconds: after which the ranks of a start are killed.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.limit_seconds = limit_seconds
        self._context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            self._context.set_forkserver_preload(LIBRARIES)

    def run(self, program: str, words: Sequence[str], *, num_ranks: int, log: Path) -> int:
        """Run a program to its end. What it prints is appended to `log`.

        Args:
            program: a file of the project, such as train.py, or the name of a module.

        Returns:
            The exit code of the first rank that failed; 0 if none did; 1 after `limit_seconds`.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environs = [_environ(rank, num_ranks, port) for rank in range(num_ranks)]
        ranks = [
            self._context.Process(target=_run_rank, args=(program, list(words), environ, str(log)))
            for environ in environs
        ]
        try:
            for rank in ranks:
                rank.start()
            return self._wait(ranks, log)
        finally:
            for rank in [rank for rank in ranks if rank.pid]:
                with suppress(ProcessLookupError):  # workers may outlive the rank that started them
                    os.killpg(rank.pid, signal.SIGKILL)
                rank.kill()  # it may not lead its group yet
                rank.join()

    def _wait(self, ranks: Sequence[BaseProcess], log: Path) -> int:
        limit, first_failure = time.monotonic() + self.limit_seconds, 0
        while any(rank.exitcode is None for rank in ranks):
            if not first_failure and (failures := [rank.exitcode for rank in ranks if rank.exitcode]):
                first_failure, limit = failures[0], min(limit, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > limit:
                break
            time.sleep(POLL_SECONDS)
        else:
            return first_failure or next((rank.exitcode for rank in ranks if rank.exitcode), 0)
        if not first_failure:
            with log.open("a") as file:
                file.write(f"\nError: it did not end within {self.limit_seconds} s. A smaller network ends sooner\n")
        return first_failure or 1


def _environ(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the environment of a rank: what MPICH's mpiexec sets, if there are several."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_STEP")}
    environ = {name: value for name, value in own.items() if name not in LAUNCHER_VARIABLES}
    environ = child_environment(environ)
    environ["PYTHONPATH"] += f"{os.pathsep}{PROJECT}"
    if num_ranks > 1:
        place = {"PMI_RANK": rank, "PMI_SIZE": num_ranks, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": num_ranks}
        environ |= {name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()}
    return environ


def _run_rank(program: str, words: Sequence[str], environ: Mapping[str, str], log: str) -> None:
    """Become a rank, and run the program."""
    os.setsid()  # a group of its own, with its workers
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, number)
        # Line buffering: otherwise the lines of two ranks would mix.
        setattr(sys, stream, os.fdopen(number, "w", buffering=1, closefd=False))
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(PROJECT)
    sys.path[:0] = [str(SOURCES), str(PROJECT)]
    sys.argv = [program, *words]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
