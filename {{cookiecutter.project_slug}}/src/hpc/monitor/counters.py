"""Counters of a node's processors, memory, networks and disks, as the kernel keeps them in /proc and /sys."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC, SYS = Path("/proc"), Path("/sys")
SECTOR_BYTES = 512  # the unit of /sys/block, whatever the disk's own sectors are
INFINIBAND_UNIT_BYTES = 4  # InfiniBand's counters count words of 4 bytes
BYTE_COLUMNS = {"received": "net_in_mbs", "sent": "net_out_mbs", "read": "disk_read_mbs", "written": "disk_write_mbs"}
IP_OVER_INFINIBAND = "32"  # ARPHRD_INFINIBAND; InfiniBand's own counters contain this traffic, too


@dataclass(frozen=True)
class Counters:
    """Totals since the node was booted. A counter that cannot be read is missing."""

    busy: Mapping[str, float]  # processors → ticks
    idle: Mapping[str, float]
    received: Mapping[str, int]  # interface or port → bytes
    sent: Mapping[str, int]
    read: Mapping[str, int]  # disk → bytes
    written: Mapping[str, int]


def read_counters(cores: set[int]) -> Counters:
    """Read the counters of these processors, of all networks but the loopback, and of the node's own disks."""
    busy, idle = _processor_ticks(cores)
    received, sent = _network_bytes()
    read, written = _disk_bytes()
    return Counters(busy, idle, received, sent, read, written)


def compute_rates(before: Counters, after: Counters, seconds: float) -> dict[str, float | None]:
    """Return the rates between two readings that are `seconds` apart, by column; None if a rate is unknown."""
    busy, idle = _increase(before.busy, after.busy), _increase(before.idle, after.idle)
    share = None if busy is None or idle is None or not busy + idle else 100 * busy / (busy + idle)
    amounts = {name: _increase(getattr(before, name), getattr(after, name)) for name in BYTE_COLUMNS}
    megabytes = {BYTE_COLUMNS[name]: None if size is None else size / 1e6 / seconds for name, size in amounts.items()}
    return {"cpu_percent": share, **megabytes}


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


def _processor_ticks(cores: set[int]) -> tuple[dict[str, float], dict[str, float]]:
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
    return ({"cpu": sum(busy)}, {"cpu": sum(idle)}) if busy else ({}, {})


def _network_bytes() -> tuple[dict[str, int], dict[str, int]]:
    received, sent = {}, {}
    slingshot = {path.name for path in SYS.glob("class/cxi/*/device/net/*")}
    for path in SYS.glob("class/net/*"):
        is_bond = any(path.glob("lower_*"))  # a bond or a bridge: its traffic is counted by the interfaces below it
        is_infiniband = _file_text(path / "type") == IP_OVER_INFINIBAND
        if path.name == "lo" or path.name in slingshot or is_bond or is_infiniband:
            continue
        _add_counter(received, path.name, path / "statistics/rx_bytes")
        _add_counter(sent, path.name, path / "statistics/tx_bytes")
    for path in SYS.glob("class/infiniband/*/ports/*/counters"):
        port = str(path.relative_to(SYS))
        _add_counter(received, port, path / "port_rcv_data", unit=INFINIBAND_UNIT_BYTES)
        _add_counter(sent, port, path / "port_xmit_data", unit=INFINIBAND_UNIT_BYTES)
    for path in SYS.glob("class/cxi/*/device/telemetry"):
        port = str(path.relative_to(SYS))
        _add_counter(received, port, path / "hni_sts_rx_ok_octets")
        _add_counter(sent, port, path / "hni_sts_tx_ok_octets")
    return received, sent


def _disk_bytes() -> tuple[dict[str, int], dict[str, int]]:
    """Return bytes read and written by device, without volumes that lie on other devices.

    The fields are those of the kernel's Documentation/block/stat.rst.
    """
    read, written = {}, {}
    for device in SYS.glob("block/*/device"):
        fields = _file_text(device.parent / "stat").split()
        with suppress(IndexError, ValueError):
            sectors = int(fields[2]), int(fields[6])
            read[device.parent.name], written[device.parent.name] = (SECTOR_BYTES * count for count in sectors)
    return read, written


def _add_counter(counters: dict[str, int], name: str, path: Path, *, unit: int = 1) -> None:
    """Add the number in a file, times `unit`. Slingshot writes `@` and a time stamp behind the number."""
    with suppress(ValueError):
        counters[name] = unit * int(_file_text(path).partition("@")[0])


def _file_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
