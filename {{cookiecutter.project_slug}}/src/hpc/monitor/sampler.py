"""The sampler of a node, in a process of its own: python -m hpc.monitor.sampler RUN_DIR ATTEMPT SECONDS GPUS PARENT

Every so many seconds one row in RUN_DIR/monitor/<host>.csv, and the same for TensorBoard. It ends when it is told to on
its standard input, and with its parent. What is not known stays an empty cell, and the log gets a line.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpc.config.project import SOURCES
from hpc.monitor import gpus
from hpc.monitor.counters import BYTES, cores, counters, memory_gb, rates
from hpc.monitor.gpus import METRICS
from hpc.monitor.sample_files import Curves, Table
from hpc.system import process

NODE = "node-"  # how the folders in tensorboard/ begin that hold the curves of a node
PLAIN = ["time", "attempt", "cpu_percent", "memory_gb", *BYTES.values()]
# A scheduler sends its warnings to every process: the ranks go on till they have saved, and so does what watches them.
BLOCKED = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]


class Sampler:
    """Between two calls of `sample`, what the node did; of this moment, memory and GPUs.

    Args:
        count: GPUs that the training uses here; 0: none is asked for.
    """

    def __init__(self, run_dir: Path, attempt: int, count: int) -> None:
        self.host, self.attempt = socket.gethostname(), attempt
        self._told: set[str] = set()
        self.names = [[f"gpu{index}_{metric}" for metric in METRICS] for index in range(count)]
        columns = [*PLAIN, *(name for names in self.names for name in names)]
        self.table = Table(run_dir / "monitor" / f"{self.host}.csv", columns)
        self.curves = Curves(run_dir / "tensorboard" / f"{NODE}{self.host}")
        self.first = self.table.first()
        self._gpus = self._found() if count else None
        self._cores = cores()
        self._before, self._since = counters(self._cores), time.monotonic()

    def sample(self) -> None:
        now, moment = counters(self._cores), time.monotonic()
        row = rates(self._before, now, moment - self._since) | {"memory_gb": memory_gb()} | self._of_gpus()
        self._before, self._since = now, moment
        self.write(time.time(), row)

    def write(self, when: float, row: Mapping[str, float | None]) -> None:
        self.first = when if self.first is None else self.first
        try:
            self.table.add({"time": when, "attempt": self.attempt, **row})
            self.curves.add(when, int(when - self.first), {f"node/{name}": value for name, value in row.items()})
        except OSError as error:
            self.tell("not written", f"{error.strerror or error}: {self.table.path.parent}; samples are lost")

    def tell(self, what: str, why: str) -> None:
        """One line in the log for each thing that goes wrong, however often it does."""
        if what not in self._told:
            self._told.add(what)
            with suppress(OSError):
                os.write(1, f"monitor of {self.host}: {what}: {why}\n".encode(errors="replace"))

    def _found(self) -> gpus.Nvidia | gpus.Amd | None:
        try:
            found = gpus.found(os.environ)
        except gpus.Missing as missing:
            self.tell("no figures of GPUs", str(missing))
            return None
        there = sum(device is not None for device in found.devices)
        if there < len(self.names):
            self.tell("no figures of some GPUs", f"{there} of {len(self.names)} can be asked")
        return found

    def _of_gpus(self) -> dict[str, float | None]:
        row: dict[str, float | None] = {}
        if library := self._gpus:
            for index, (names, device) in enumerate(zip(self.names, library.devices, strict=False)):
                if device is not None:
                    row |= zip(names, library.read(device, partial(self.tell, f"GPU {index}")), strict=True)
        return row


def started(run_dir: Path, attempt: int, seconds: float, count: int) -> int | None:
    """Start it for this process. The end of a pipe that tells it to end; None: it could not be started."""
    reads, writes = os.pipe()
    words = [str(run_dir), str(attempt), str(seconds), str(count), str(os.getpid())]
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    try:
        os.posix_spawn(  # unlike a fork it copies nothing of a process that may hold a large model
            sys.executable,
            [sys.executable, "-P", "-m", f"{__package__}.sampler", *words],
            os.environ | {"PYTHONPATH": path},
            file_actions=[(os.POSIX_SPAWN_DUP2, reads, 0)],
            setsigmask=BLOCKED,
        )
    except OSError as error:
        print(f"warning: this node is not watched: {error.strerror}", flush=True)
        os.close(writes)
        return None
    finally:
        os.close(reads)
    return writes


def main(run_dir: str, attempt: str, seconds: str, count: str, parent: str) -> None:
    process.die_with_parent()
    if os.getppid() != int(parent):
        return
    os.nice(19)
    sampler, every = Sampler(Path(run_dir), int(attempt), int(count)), float(seconds)
    told = False
    while not told:
        told = bool(select.select([0], [], [], every)[0])
        sampler.sample()  # also at the end: a run may be shorter than that


if __name__ == "__main__":
    main(*sys.argv[1:])
