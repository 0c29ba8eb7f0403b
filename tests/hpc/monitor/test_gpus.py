"""Check what torch's readings become, with an NVIDIA driver and AMD's stood in for at their public functions."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from hpc.monitor import gpus

LOST = "GPU is lost"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Stand in for NVML with two GPUs, of which those in the returned set are lost."""
    lost: set[int] = set()

    def answer(value: Any) -> Any:
        def read(handle: int, *_: Any) -> Any:
            if handle in lost:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
            return value

        return read

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    for name, value in {
        "UtilizationRates": SimpleNamespace(gpu=75, memory=40),
        "PowerUsage": 250500,
        "Temperature": 50,
    }.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", answer(value))
    monkeypatch.setattr(torch.cuda, "device_memory_used", answer(2 * 10**9))  # torch asks CUDA itself for the device
    return lost


def test_the_figures_of_nvidias_gpus_and_their_units(driver: set[int]) -> None:
    values = {"percent": 75, "memory_gb": 2, "watts": 250.5, "celsius": 50}
    expected = {f"gpu{index}_{metric}": value for index in (0, 1) for metric, value in values.items()}
    assert gpus.read_gpus(2) == (expected, {})
    assert gpus.read_gpus(0) == ({}, {})


def test_a_gpu_that_falls_off_the_bus_while_others_stay(driver: set[int]) -> None:
    driver.add(1)
    figures, errors = gpus.read_gpus(2)
    assert [figures[f"gpu0_{metric}"] for metric in gpus.READERS] == [75, 2, 250.5, 50]
    lost = [f"gpu1_{metric}" for metric in gpus.READERS]
    assert [figures[name] for name in lost] == [None] * 4 and errors == {LOST: lost}


def test_gpus_that_this_process_does_not_see_are_named(driver: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    figures, errors = gpus.read_gpus(2)
    assert figures["gpu0_percent"] == 75 and figures["gpu1_percent"] is None
    assert any("device 1 is not visible" in error for error in errors)


def test_amds_power_is_in_watts_and_unknown_if_it_is_0(driver: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    readers = {"utilization": "N/A", "device_memory_used": 2**30, "temperature": 55}
    for name, value in readers.items():
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: value)
    monkeypatch.setattr(torch.cuda, "power_draw", [300, 0].__getitem__)
    figures, errors = gpus.read_gpus(2)
    assert (figures["gpu0_watts"], figures["gpu1_watts"]) == (300, None)
    assert figures["gpu0_percent"] is None and figures["gpu0_memory_gb"] == pytest.approx(1.073741824)
    assert sorted(errors.values()) == [["gpu0_percent", "gpu1_percent"], ["gpu1_watts"]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_driver_all_are_unknown_and_the_reason_is_given() -> None:
    figures, errors = gpus.read_gpus(1)
    assert set(figures.values()) == {None} and any("NVML" in error or "driver" in error for error in errors)
