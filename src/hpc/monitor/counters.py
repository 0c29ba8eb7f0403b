"""The counters of a node: use of its processors, memory, networks and disks.

Most are psutil's. It knows neither InfiniBand nor Slingshot, and counts a bond and a disk below a volume twice (7.2):
/sys says which devices to count.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

SYS = Path("/sys")
INFINIBAND_UNIT_BYTES = 4  # InfiniBand's counters count words of 4 bytes
IP_OVER_INFINIBAND = "32"  # ARPHRD_INFINIBAND; InfiniBand's own counters contain this traffic, too
# Totals since the node was booted: busy, idle, or a column of bytes → device → total. What cannot be read is missing.
Counters = dict[str, dict[str, float]]


def read_counters(cores: set[int]) -> Counters:
    """Read the counters of these processors, of all networks but the loopback, and of the node's own disks."""
    return _processor_seconds(cores) | _network_bytes() | _disk_bytes()


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
        memory = psutil.virtual_memory()
        return (memory.total - memory.available) / 1e9
    return None


def allocated_cores() -> set[int]:
    """Return the cores that the job has on this node: the kernel lets a thread use no others, whatever it asks for."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    cores = os.sched_getaffinity(0)  # of this thread: a rank is often bound to some of the job's cores
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        allocated = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        return allocated
    return cores


def _increase(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return by how much counters grew, summed; None if there is none, or if one of them restarted."""
    added = [after[name] - before[name] for name in before.keys() & after.keys()]
    return sum(added) if added and min(added) >= 0 else None


def _processor_seconds(cores: set[int]) -> Counters:
    """Return busy and idle seconds; waiting for a disk counts as idle.

    They are summed over the cores, because the counter of a single core may go back.
    """
    times: list = []
    with suppress(OSError, ValueError):
        times = psutil.cpu_times(percpu=True)
    numbers = sorted(int(path.parent.name[3:]) for path in SYS.glob("devices/system/cpu/cpu[0-9]*/topology"))
    if len(numbers) != len(times):  # psutil does not number the cores, of which some may be offline
        numbers = list(range(len(times)))
    own = [core for number, core in zip(numbers, times, strict=True) if number in cores]
    if not own:
        return {"busy": {}, "idle": {}}
    idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in own)
    # The time of guests is also a part of the user's.
    total = sum(sum(core) - getattr(core, "guest", 0.0) - getattr(core, "guest_nice", 0.0) for core in own)
    return {"busy": {"cpu": total - idle}, "idle": {"cpu": idle}}


def _network_bytes() -> Counters:
    received: dict[str, float] = {}
    sent: dict[str, float] = {}
    slingshot = {path.name for path in SYS.glob("class/cxi/*/device/net/*")}
    interfaces: Mapping = {}
    with suppress(OSError, ValueError):
        interfaces = psutil.net_io_counters(pernic=True, nowrap=False)
    for name, counters in interfaces.items():
        folder = SYS / "class/net" / name
        is_bond = any(folder.glob("lower_*"))  # a bond or a bridge: its traffic is counted by the interfaces below it
        is_infiniband = _file_text(folder / "type") == IP_OVER_INFINIBAND
        if name != "lo" and name not in slingshot and not is_bond and not is_infiniband:
            received[name], sent[name] = counters.bytes_recv, counters.bytes_sent
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
    """Return bytes read and written by device, without volumes that lie on other devices."""
    disks: Mapping = {}
    with suppress(OSError, ValueError, NotImplementedError):
        disks = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
    own = {name: counters for name, counters in disks.items() if (SYS / "block" / name / "device").exists()}
    return {
        "disk_read_mbs": {name: counters.read_bytes for name, counters in own.items()},
        "disk_write_mbs": {name: counters.write_bytes for name, counters in own.items()},
    }


def _add_counter(counters: dict[str, float], name: str, *, path: Path, unit: int = 1) -> None:
    """Add the number in a file, times `unit`. Slingshot writes `@` and a time stamp behind the number."""
    with suppress(ValueError):
        counters[name] = unit * int(_file_text(path).partition("@")[0])


def _file_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
