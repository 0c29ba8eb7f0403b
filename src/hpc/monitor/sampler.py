"""The sampler of a node, a process of its own: python -m hpc.monitor.sampler RUN_DIR ATTEMPT SECONDS NUM_GPUS PARENT

Every SECONDS it appends a row to RUN_DIR/monitor/<host>.csv, and writes the same values for TensorBoard. It ends when a
byte arrives on its standard input, or when its parent (a process id) ends. An unknown value is an empty cell, and its
reason a line in the log.

The counters are the kernel's, of /proc and /sys: psutil (7.2) knows neither InfiniBand nor Slingshot, and counts a bond
and a disk below a volume twice. Lightning's DeviceStatsMonitor (2.6) knows neither the use nor the power of a GPU.
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

from hpc.config.project import child_environment
from hpc.monitor import gpus
from hpc.system import process

COLUMNS = ["time", "attempt", "cpu_percent", "memory_gb", "net_in_mbs", "net_out_mbs"]
COLUMNS += ["disk_read_mbs", "disk_write_mbs"]
PROC, SYS = Path("/proc"), Path("/sys")
SECTOR_BYTES = 512  # the unit of /sys/block, whatever the disk's own sectors are
INFINIBAND_UNIT_BYTES = 4  # InfiniBand's counters count words of 4 bytes
IP_OVER_INFINIBAND = "32"  # ARPHRD_INFINIBAND; InfiniBand's own counters contain this traffic, too
# A scheduler sends its warnings to every process. The ranks continue until they have saved, and the sampler with them.
BLOCKED_SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
# Totals since the node was booted: busy, idle, or a column of bytes → device → total. What cannot be read is missing.
Counters = dict[str, dict[str, float]]


class NodeSampler:
    """Take samples of a node: rates since the sample before, and the present state of memory and GPUs.

    Args:
        num_gpus: that the training uses on this node; with 0, no GPU is sampled.
    """

    def __init__(self, run_dir: Path, attempt: int, num_gpus: int) -> None:
        from hpc.monitor.event_files import ScalarWriter  # not above, as training imports this module
        from hpc.monitor.node_usage import SampleTable

        self.host, self.attempt = socket.gethostname(), attempt
        self._warned_of: set[str] = set()
        self.gpu_columns = [[f"gpu{index}_{metric}" for metric in gpus.METRICS] for index in range(num_gpus)]
        columns = [*COLUMNS, *(name for names in self.gpu_columns for name in names)]
        self.table = SampleTable(run_dir / "monitor" / f"{self.host}.csv", columns)
        self.scalars = ScalarWriter(run_dir / "tensorboard" / f"node-{self.host}")
        self.first_time = self.table.first_time()
        self._gpu_library = self._open_gpu_library() if num_gpus else None
        self._cores = widen_to_allocated_cores()
        self._last_counters, self._last_seconds = read_counters(self._cores), time.monotonic()

    def sample(self) -> None:
        """Take a sample, and write it."""
        counters, seconds = read_counters(self._cores), time.monotonic()
        rates = compute_rates(self._last_counters, counters, seconds=seconds - self._last_seconds)
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


def read_counters(cores: set[int]) -> Counters:
    """Read the counters of these processors, of all networks but the loopback, and of the node's own disks."""
    return _processor_ticks(cores) | _network_bytes() | _disk_bytes()


def compute_rates(before: Counters, after: Counters, *, seconds: float) -> dict[str, float | None]:
    """Return the rates between two readings that are `seconds` apart, by column; None if a rate is unknown."""
    growth = {name: _increase(before[name], after[name]) for name in before}
    busy, idle = growth.pop("busy"), growth.pop("idle")
    share = None if busy is None or idle is None or not busy + idle else 100 * busy / (busy + idle)
    return {"cpu_percent": share} | {
        name: None if size is None else size / 1e6 / seconds for name, size in growth.items()
    }


def used_memory_gb() -> float | None:
    """Return the memory of the node that no program could get, in 1e9 bytes; None if it is unknown."""
    with suppress(OSError, ValueError, KeyError):
        lines = (PROC / "meminfo").read_text().splitlines()
        sizes = {name: float(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
        return (sizes["MemTotal"] - sizes["MemAvailable"]) * 1024 / 1e9
    return None


def widen_to_allocated_cores() -> set[int]:
    """Let this process run on all cores that the job has on this node, not only on its rank's, and return them."""
    with suppress(OSError, AttributeError):  # the kernel ignores cores that the job was not given
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _increase(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return by how much counters grew, summed; None if there is none, or if one of them restarted."""
    added = [after[name] - before[name] for name in before.keys() & after.keys()]
    return sum(added) if added and min(added) >= 0 else None


def _processor_ticks(cores: set[int]) -> Counters:
    """Return busy and idle ticks; waiting for a disk counts as idle.

    They are summed over the cores, because the counter of a single core may go back.
    """
    busy, idle = [], []
    with suppress(OSError, ValueError):
        for line in (PROC / "stat").read_text().splitlines():
            name, *ticks = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
                user, nice, system, idle_ticks, waiting, *interrupts = map(float, ticks[:8])
                busy.append(user + nice + system + sum(interrupts))
                idle.append(idle_ticks + waiting)
    return {"busy": {"cpu": sum(busy)}, "idle": {"cpu": sum(idle)}} if busy else {"busy": {}, "idle": {}}


def _network_bytes() -> Counters:
    received: dict[str, float] = {}
    sent: dict[str, float] = {}
    slingshot = {path.name for path in SYS.glob("class/cxi/*/device/net/*")}
    for path in SYS.glob("class/net/*"):
        is_bond = any(path.glob("lower_*"))  # a bond or a bridge: its traffic is counted by the interfaces below it
        is_infiniband = _file_text(path / "type") == IP_OVER_INFINIBAND
        if path.name == "lo" or path.name in slingshot or is_bond or is_infiniband:
            continue
        _add_counter(received, path.name, path=path / "statistics/rx_bytes")
        _add_counter(sent, path.name, path=path / "statistics/tx_bytes")
    for path in SYS.glob("class/infiniband/*/ports/*/counters"):
        port = str(path.relative_to(SYS))
        _add_counter(received, port, path=path / "port_rcv_data", unit=INFINIBAND_UNIT_BYTES)
        _add_counter(sent, port, path=path / "port_xmit_data", unit=INFINIBAND_UNIT_BYTES)
    for path in SYS.glob("class/cxi/*/device/telemetry"):
        port = str(path.relative_to(SYS))
        _add_counter(received, port, path=path / "hni_sts_rx_ok_octets")
        _add_counter(sent, port, path=path / "hni_sts_tx_ok_octets")
    return {"net_in_mbs": received, "net_out_mbs": sent}


def _disk_bytes() -> Counters:
    """Return bytes read and written by device, without volumes that lie on other devices.

    The fields are those of the kernel's Documentation/block/stat.rst.
    """
    read: dict[str, float] = {}
    written: dict[str, float] = {}
    for device in SYS.glob("block/*/device"):
        fields = _file_text(device.parent / "stat").split()
        with suppress(IndexError, ValueError):
            sectors = int(fields[2]), int(fields[6])
            read[device.parent.name], written[device.parent.name] = (SECTOR_BYTES * count for count in sectors)
    return {"disk_read_mbs": read, "disk_write_mbs": written}


def _add_counter(counters: dict[str, float], name: str, *, path: Path, unit: int = 1) -> None:
    """Add the number in a file, times `unit`. Slingshot writes `@` and a time stamp behind the number."""
    with suppress(ValueError):
        counters[name] = unit * int(_file_text(path).partition("@")[0])


def _file_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def start_sampler(run_dir: Path, attempt: int, *, every_seconds: float, num_gpus: int) -> int | None:
    """Start the sampler as a child of this process.

    Returns:
        The end of a pipe: a byte in it ends the sampler. None if it could not be started, which is printed.
    """
    reads, writes = os.pipe()
    words = [str(run_dir), str(attempt), str(every_seconds), str(num_gpus), str(os.getpid())]
    try:
        os.posix_spawn(  # unlike a fork, it copies nothing of this process, which may hold a large model
            sys.executable,
            [sys.executable, "-P", "-m", f"{__package__}.sampler", *words],
            child_environment(os.environ),
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
