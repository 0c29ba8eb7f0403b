"""The sampler of a node, a process of its own: python -m hpc.monitor.sampler RUN_DIR ATTEMPT SECONDS NUM_GPUS PARENT

Every SECONDS it appends a row to RUN_DIR/monitor/<host>.csv, and writes the same values for TensorBoard. It ends when a
byte arrives on its standard input, or when its parent (a process id) ends. An unknown value is an empty cell, and its
reason a line in the log.
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
from hpc.monitor.counters import (
    BYTE_COLUMNS,
    compute_rates,
    read_counters,
    used_memory_gb,
    widen_to_allocated_cores,
)
from hpc.monitor.gpus import METRICS
from hpc.monitor.sample_files import SampleTable, ScalarWriter
from hpc.system import process

NODE_PREFIX = "node-"  # of the folders in tensorboard/ that hold the curves of a node
COLUMNS = ["time", "attempt", "cpu_percent", "memory_gb", *BYTE_COLUMNS.values()]
# A scheduler sends its warnings to every process. The ranks continue until they have saved, and the sampler with them.
BLOCKED_SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]


class NodeSampler:
    """Take samples of a node: rates since the sample before, and the present state of memory and GPUs.

    Args:
        num_gpus: that the training uses on this node; with 0, no GPU is sampled.
    """

    def __init__(self, run_dir: Path, attempt: int, num_gpus: int) -> None:
        self.host, self.attempt = socket.gethostname(), attempt
        self._warned_of: set[str] = set()
        self.gpu_columns = [[f"gpu{index}_{metric}" for metric in METRICS] for index in range(num_gpus)]
        columns = [*COLUMNS, *(name for names in self.gpu_columns for name in names)]
        self.table = SampleTable(run_dir / "monitor" / f"{self.host}.csv", columns)
        self.scalars = ScalarWriter(run_dir / "tensorboard" / f"{NODE_PREFIX}{self.host}")
        self.first_time = self.table.first_time()
        self._gpu_library = self._open_gpu_library() if num_gpus else None
        self._cores = widen_to_allocated_cores()
        self._last_counters, self._last_seconds = read_counters(self._cores), time.monotonic()

    def sample(self) -> None:
        """Take a sample, and write it."""
        counters, seconds = read_counters(self._cores), time.monotonic()
        rates = compute_rates(self._last_counters, counters, seconds - self._last_seconds)
        self._last_counters, self._last_seconds = counters, seconds
        self.write(time.time(), rates | {"memory_gb": used_memory_gb()} | self._gpu_figures())

    def write(self, unix_time: float, values: Mapping[str, float | None]) -> None:
        """Append values to both files. A step of the curves is a second since the first sample of the run."""
        self.first_time = unix_time if self.first_time is None else self.first_time
        try:
            self.table.add({"time": unix_time, "attempt": self.attempt, **values})
            step = int(unix_time - self.first_time)
            self.scalars.add(unix_time, step, {f"node/{name}": value for name, value in values.items()})
        except OSError as error:
            reason = f"cannot write {self.table.path.parent}: {error.strerror or error}"
            self.warn_once("samples are lost", reason)

    def warn_once(self, problem: str, reason: str) -> None:
        """Write a line into the log when a problem occurs for the first time."""
        if problem not in self._warned_of:
            self._warned_of.add(problem)
            with suppress(OSError):
                os.write(1, f"monitor of {self.host}: {problem}: {reason}\n".encode(errors="replace"))

    def _open_gpu_library(self) -> gpus.NvidiaLibrary | gpus.AmdLibrary | None:
        try:
            library = gpus.open_library(os.environ)
        except gpus.NoGpuLibrary as error:
            self.warn_once("the GPUs are not sampled", str(error))
            return None
        num_readable = sum(device is not None for device in library.devices)
        if num_readable < len(self.gpu_columns):
            reason = f"only {num_readable} of {len(self.gpu_columns)} can be read"
            self.warn_once("some GPUs are not sampled", reason)
        return library

    def _gpu_figures(self) -> dict[str, float | None]:
        figures: dict[str, float | None] = {}
        if library := self._gpu_library:
            for index, (columns, device) in enumerate(zip(self.gpu_columns, library.devices, strict=False)):
                if device is not None:
                    report_error = partial(self.warn_once, f"GPU {index}")
                    figures |= zip(columns, library.read_figures(device, report_error), strict=True)
        return figures


def start_sampler(run_dir: Path, attempt: int, *, every_seconds: float, num_gpus: int) -> int | None:
    """Start the sampler as a child of this process.

    Returns:
        The end of a pipe: a byte in it ends the sampler. None if it could not be started, which is printed.
    """
    reads, writes = os.pipe()
    words = [str(run_dir), str(attempt), str(every_seconds), str(num_gpus), str(os.getpid())]
    path = os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))
    try:
        os.posix_spawn(  # unlike a fork, it copies nothing of this process, which may hold a large model
            sys.executable,
            [sys.executable, "-P", "-m", f"{__package__}.sampler", *words],
            os.environ | {"PYTHONPATH": path},
            file_actions=[(os.POSIX_SPAWN_DUP2, reads, 0)],
            setsigmask=BLOCKED_SIGNALS,
        )
    except OSError as error:
        print(f"warning: cannot start the sampler of this node (callbacks.monitor): {error.strerror}", flush=True)
        os.close(writes)
        return None
    finally:
        os.close(reads)
    return writes


def main(run_dir: str, attempt: str, every_seconds: str, num_gpus: str, parent_pid: str) -> None:
    """Sample until a byte arrives on standard input."""
    process.die_with_parent()
    if os.getppid() != int(parent_pid):  # it ended before that call
        return
    os.nice(19)
    sampler = NodeSampler(Path(run_dir), int(attempt), int(num_gpus))
    is_ended = False
    while not is_ended:
        is_ended = bool(select.select([0], [], [], float(every_seconds))[0])
        sampler.sample()  # also at the end, since a run may be shorter than one interval


if __name__ == "__main__":
    main(*sys.argv[1:])
