"""Check a node's counters, from files as the kernel writes them, and from this machine's own."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hpc.monitor import counters
from hpc.monitor.counters import Counters, compute_rates

Machine = Callable[[dict[str, object]], None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Write another machine's /proc and /sys: path → content of the file; None: a folder."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    monkeypatch.setattr(counters, "SYS", tmp_path / "sys")

    def write(files: dict[str, object]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if text is None else path.write_text(f"{text}\n")

    return write


def interface(name: str, kind: int = 1, folder: str = "") -> dict[str, object]:
    base = f"sys/class/net/{name}"
    return {f"{base}/type": kind} | ({f"{base}/{folder}": None} if folder else {})


def test_the_processors_of_the_job_and_no_others(machine: Machine) -> None:
    #       user nice system idle iowait irq softirq steal guest guest_nice
    idle = "0 0 0 0 0 0 0 0 0 0"
    before = f"cpu {idle}\ncpu0 10 0 0 100 0 0 0 0 0 0\ncpu1 {idle}\ncpu12 5 5 5 50 5 1 1 1 7 7"
    after = f"cpu {idle}\ncpu0 40 0 0 170 0 0 0 0 0 0\ncpu1 99 {idle[2:]}\ncpu12 15 5 5 80 65 1 1 1 9 9"
    machine({f"sys/devices/system/cpu/cpu{number}/topology": None for number in (0, 1, 12)})  # the others are offline
    machine({"proc/stat": before})
    first = counters.read_counters({0, 12})
    machine({"proc/stat": after})
    rates = compute_rates(first, counters.read_counters({0, 12}), seconds=1)
    assert rates["cpu_percent"] == pytest.approx(100 * 40 / 200), "a guest's time is also the user's, and counts once"


def test_stacked_networks_are_counted_once(machine: Machine) -> None:
    rail, cassini = "sys/class/infiniband/mlx5_0/ports/1/counters", "sys/class/cxi/cxi0/device"
    bytes_of = {"lo": (10**9, 10**9), "eth0": (1000, 100), "eth1": (2000, 200), "bond0": (3000, 300)}
    bytes_of |= {"ib0": (7777, 7777), "hsn0": (8888, 8888)}
    lines = [f"{name}: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0" for name, (received, sent) in bytes_of.items()]
    machine({"proc/net/dev": "\n".join(["Inter-| Receive", " face |bytes", *lines])})
    machine(interface("lo") | interface("eth0") | interface("eth1"))
    machine(interface("bond0", folder="lower_eth0") | interface("ib0", kind=32))
    machine({f"{rail}/port_rcv_data": 5000, f"{rail}/port_xmit_data": 500})
    machine(interface("hsn0") | {f"{cassini}/net/hsn0": None})
    for direction, octets in {"rx": 40000, "tx": 4000}.items():
        machine({f"{cassini}/telemetry/hni_sts_{direction}_ok_octets": f"{octets}@1700000000.123456789"})
    readings = counters.read_counters(set())
    assert (sum(readings["net_in_mbs"].values()), sum(readings["net_out_mbs"].values())) == (63000, 6300)
    assert len(readings["net_in_mbs"]) == 4


def test_disks_are_devices_and_sectors_512_bytes(machine: Machine) -> None:
    counts = "7 0 2000 9 8 0 4000 9 0 9 9 0 0 0 0 0 0"
    machine({"proc/diskstats": f"259 0 nvme0n1 {counts}\n259 1 nvme0n1p1 {counts}\n253 0 dm-0 {counts}"})
    machine({"sys/block/nvme0n1/device": None, "sys/block/dm-0/size": 1})
    readings = counters.read_counters(set())
    assert (readings["disk_read_mbs"], readings["disk_write_mbs"]) == ({"nvme0n1": 1024000}, {"nvme0n1": 2048000})


def test_used_memory_is_total_minus_available(machine: Machine) -> None:
    machine({"proc/meminfo": "MemTotal:  8000000 kB\nMemFree:  1 kB\nMemAvailable:  2000000 kB\nHugePages_Total:  0"})
    assert counters.used_memory_gb() == pytest.approx(6.144)


def make_counters(**totals: dict[str, float]) -> Counters:
    names = ("busy", "idle", "net_in_mbs", "net_out_mbs", "disk_read_mbs", "disk_write_mbs")
    return {name: totals.get(name, {}) for name in names}


def test_rates_are_per_second_and_unknown_if_a_counter_restarted() -> None:
    before = make_counters(
        net_in_mbs={"eth0": 2**32 - 1000}, net_out_mbs={"eth0": 0, "eth1": 0}, disk_read_mbs={"sda": 0}
    )
    after = make_counters(
        net_in_mbs={"eth0": 500},
        net_out_mbs={"eth0": 3 * 10**6, "eth1": 10**6},
        disk_read_mbs={"sda": 0, "usb": 10**12},
    )
    readings = compute_rates(before, after, seconds=2)
    assert readings == {
        "cpu_percent": None, "net_in_mbs": None, "net_out_mbs": 2, "disk_read_mbs": 0, "disk_write_mbs": None,
    }  # fmt: skip


def test_a_machine_without_counters(machine: Machine) -> None:
    nothing = counters.read_counters({0})
    assert (
        set(compute_rates(nothing, counters.read_counters({0}), seconds=1).values()) == {None}
        and counters.used_memory_gb() is None
    )


def test_the_cores_of_this_job_are_known_from_a_bound_thread() -> None:
    allowed, bound = counters.allocated_cores(), set()

    def read_bound() -> None:
        own = {min(os.sched_getaffinity(0))}
        os.sched_setaffinity(0, own)  # of this thread alone
        bound.update(counters.allocated_cores())
        assert os.sched_getaffinity(0) == own
        ends.append(True)

    ends: list[bool] = []
    thread = threading.Thread(target=read_bound)
    thread.start()
    thread.join(30)
    assert ends and bound == allowed >= os.sched_getaffinity(0)


def test_this_machine_has_all_counters() -> None:
    readings = counters.read_counters(counters.allocated_cores())
    assert readings["busy"]["cpu"] > 0 and readings["idle"]["cpu"] >= 0
    assert 0 < (counters.used_memory_gb() or 0) < psutil.virtual_memory().total / 1e9
