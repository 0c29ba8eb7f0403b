"""What a node's processors, memory, networks and disks have done, from the kernel's counters in /proc and /sys."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC, SYS = Path("/proc"), Path("/sys")
SECTOR = 512  # bytes, in /sys/block, whatever the disk's own are
LANES = 4  # InfiniBand counts in units of so many bytes
BYTES = {"received": "net_in_mbs", "sent": "net_out_mbs", "read": "disk_read_mbs", "written": "disk_write_mbs"}
INFINIBAND = "32"  # ARPHRD_INFINIBAND: IP over InfiniBand, which InfiniBand's own counters hold as well


@dataclass(frozen=True)
class Counters:
    """Since the node was booted. What cannot be read is not there."""

    busy: Mapping[str, float]  # processors → ticks
    idle: Mapping[str, float]
    received: Mapping[str, int]  # interface or port → bytes
    sent: Mapping[str, int]
    read: Mapping[str, int]  # disk → bytes
    written: Mapping[str, int]


def counters(cores: set[int]) -> Counters:
    """Of these processors, of all networks but the loopback, of the node's own disks."""
    busy, idle = _processors(cores)
    received, sent = _networks()
    read, written = _disks()
    return Counters(busy, idle, received, sent, read, written)


def rates(before: Counters, after: Counters, seconds: float) -> dict[str, float | None]:
    """What happened between two readings, per second; None where it is not known."""
    busy, idle = _more(before.busy, after.busy), _more(before.idle, after.idle)
    share = None if busy is None or idle is None or not busy + idle else 100 * busy / (busy + idle)
    amounts = {name: _more(getattr(before, name), getattr(after, name)) for name in BYTES}
    megabytes = {BYTES[name]: None if size is None else size / 1e6 / seconds for name, size in amounts.items()}
    return {"cpu_percent": share, **megabytes}


def memory_gb() -> float | None:
    """In use on the node, in 1e9 bytes: what programs could not have."""
    with suppress(OSError, ValueError, KeyError):
        lines = (PROC / "meminfo").read_text().splitlines()
        sizes = {name: float(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
        return (sizes["MemTotal"] - sizes["MemAvailable"]) * 1024 / 1e9
    return None


def cores() -> set[int]:
    """The processors that the job may use here. From now on this process may use them all, not its rank's alone."""
    with suppress(OSError, AttributeError):  # the kernel leaves out what the job was not given
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _more(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """The sum of what was added; None if nothing was counted, or a counter began anew."""
    added = [after[name] - before[name] for name in before.keys() & after.keys()]
    return sum(added) if added and min(added) >= 0 else None


def _processors(cores: set[int]) -> tuple[dict[str, float], dict[str, float]]:
    """Ticks that they were busy, and idle: waiting for a disk is idle, too. Summed, as a single one may go back."""
    busy, idle = [], []
    with suppress(OSError, ValueError):
        for line in (PROC / "stat").read_text().splitlines():
            name, *ticks = line.split()
            if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
                user, nice, system, idling, waiting, *interrupts = map(float, ticks[:8])
                busy.append(user + nice + system + sum(interrupts))
                idle.append(idling + waiting)
    return ({"cpu": sum(busy)}, {"cpu": sum(idle)}) if busy else ({}, {})


def _networks() -> tuple[dict[str, int], dict[str, int]]:
    received, sent = {}, {}
    slingshot = {path.name for path in SYS.glob("class/cxi/*/device/net/*")}
    for path in SYS.glob("class/net/*"):
        made_of_others = any(path.glob("lower_*"))  # a bond or a bridge: what it carries, they carry
        if path.name == "lo" or path.name in slingshot or made_of_others or _text(path / "type") == INFINIBAND:
            continue
        _note(received, path.name, path / "statistics/rx_bytes")
        _note(sent, path.name, path / "statistics/tx_bytes")
    for path in SYS.glob("class/infiniband/*/ports/*/counters"):
        port = str(path.relative_to(SYS))
        _note(received, port, path / "port_rcv_data", LANES)
        _note(sent, port, path / "port_xmit_data", LANES)
    for path in SYS.glob("class/cxi/*/device/telemetry"):
        port = str(path.relative_to(SYS))
        _note(received, port, path / "hni_sts_rx_ok_octets")
        _note(sent, port, path / "hni_sts_tx_ok_octets")
    return received, sent


def _disks() -> tuple[dict[str, int], dict[str, int]]:
    """Of real devices; not of what is laid over them. See the kernel's Documentation/block/stat.rst."""
    read, written = {}, {}
    for device in SYS.glob("block/*/device"):
        fields = _text(device.parent / "stat").split()
        with suppress(IndexError, ValueError):
            sectors = int(fields[2]), int(fields[6])
            read[device.parent.name], written[device.parent.name] = (SECTOR * count for count in sectors)
    return read, written


def _note(counts: dict[str, int], name: str, path: Path, unit: int = 1) -> None:
    """A counter as a file holds it; Slingshot's adds `@` and the time when it was read."""
    with suppress(ValueError):
        counts[name] = unit * int(_text(path).partition("@")[0])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
