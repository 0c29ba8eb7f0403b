"""Check a node's counters, from files as the kernel writes them, and from this machine's own."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpc.monitor import sampler
from hpc.monitor.sampler import Counters, compute_rates

Machine = Callable[[dict[str, object]], None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Write another machine's /proc and /sys: path → content of the file; None: a folder."""
    monkeypatch.setattr(sampler, "PROC", tmp_path / "proc")
    monkeypatch.setattr(sampler, "SYS", tmp_path / "sys")

    def write(files: dict[str, object]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if text is None else path.write_text(f"{text}\n")

    return write


def interface(name: str, received: int, sent: int, kind: int = 1, folder: str = "") -> dict[str, object]:
    base = f"sys/class/net/{name}"
    files = {
        f"{base}/type": kind,
        f"{base}/statistics/rx_bytes": received,
        f"{base}/statistics/tx_bytes": sent,
    }
    return files | ({f"{base}/{folder}": None} if folder else {})


def test_the_processors_of_the_job_and_no_others(machine: Machine) -> None:
    #             user nice system idle iowait irq softirq steal guest
    before = "cpu  9 9 9 9 9 9 9 9\ncpu0 10 0 0 100 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\ncpu12 5 5 5 50 5 1 1 1 7 7"
    after = "cpu  9 9 9 9 9 9 9 9\ncpu0 40 0 0 170 0 0 0 0\ncpu1 99 0 0 0 0 0 0 0\ncpu12 15 5 5 80 65 1 1 1 9 9"
    machine({"proc/stat": before})
    first = sampler.read_counters({0, 12})
    machine({"proc/stat": after})
    rates = compute_rates(first, sampler.read_counters({0, 12}), seconds=1)
    assert rates["cpu_percent"] == pytest.approx(100 * 40 / 200)


def test_stacked_networks_are_counted_once(machine: Machine) -> None:
    rail, cassini = "sys/class/infiniband/mlx5_0/ports/1/counters", "sys/class/cxi/cxi0/device"
    machine(interface("lo", 10**9, 10**9) | interface("eth0", 1000, 100) | interface("eth1", 2000, 200))
    machine(interface("bond0", 3000, 300, folder="lower_eth0") | interface("ib0", 7777, 7777, kind=32))
    machine({f"{rail}/port_rcv_data": 5000, f"{rail}/port_xmit_data": 500})
    machine(interface("hsn0", 8888, 8888) | {f"{cassini}/net/hsn0": None})
    for direction, octets in {"rx": 40000, "tx": 4000}.items():
        machine({f"{cassini}/telemetry/hni_sts_{direction}_ok_octets": f"{octets}@1700000000.123456789"})
    readings = sampler.read_counters(set())
    assert (sum(readings["net_in_mbs"].values()), sum(readings["net_out_mbs"].values())) == (63000, 6300)
    assert len(readings["net_in_mbs"]) == 4


def test_disks_are_devices_and_sectors_512_bytes(machine: Machine) -> None:
    machine({"sys/block/nvme0n1/device": None, "sys/block/nvme0n1/stat": "  7 0 2000 9 8 0 4000 9 0 9 9"})
    machine({"sys/block/dm-0/stat": "  7 0 2000 9 8 0 4000 9 0 9 9"})
    machine({"sys/block/sr0/device": None, "sys/block/sr0/stat": "cut off"})
    readings = sampler.read_counters(set())
    assert (readings["disk_read_mbs"], readings["disk_write_mbs"]) == ({"nvme0n1": 1024000}, {"nvme0n1": 2048000})


def test_used_memory_is_total_minus_available(machine: Machine) -> None:
    machine({"proc/meminfo": "MemTotal:  8000000 kB\nMemFree:  1 kB\nMemAvailable:  2000000 kB\nHugePages_Total:  0"})
    assert sampler.used_memory_gb() == pytest.approx(6.144)


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
    nothing = sampler.read_counters({0})
    assert (
        set(compute_rates(nothing, sampler.read_counters({0}), seconds=1).values()) == {None}
        and sampler.used_memory_gb() is None
    )


def test_this_machine_agrees_with_psutil() -> None:
    psutil = pytest.importorskip("psutil")
    before, readings, after = (
        psutil.cpu_times(),
        sampler.read_counters(sampler.widen_to_allocated_cores()),
        psutil.cpu_times(),
    )
    ticks = readings["idle"]["cpu"] / 100 if len(sampler.widen_to_allocated_cores()) == psutil.cpu_count() else None
    if ticks is not None:
        assert before.idle + before.iowait - 1 <= ticks <= after.idle + after.iowait + 1
    memory = psutil.virtual_memory()
    assert sampler.used_memory_gb() == pytest.approx((memory.total - memory.available) / 1e9, abs=0.2)
    interfaces = psutil.net_io_counters(pernic=True)
    assert {name for name in readings["net_in_mbs"] if "/" not in name} <= interfaces.keys()
    for name, received in readings["net_in_mbs"].items():
        assert "/" in name or received <= psutil.net_io_counters(pernic=True)[name].bytes_recv
