"""Check NVML and AMD SMI with stand-ins that answer and fail as the real libraries do."""

import shutil
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from hpc.monitor import gpus
from hpc.monitor.gpus import AmdLibrary, NoGpuLibrary, NvidiaLibrary, visible_devices

UUIDS = ["GPU-11111111-aaaa", "GPU-12222222-bbbb", "GPU-33333333-cccc", "GPU-44444444-dddd"]
SLICE = "MIG-55555555-eeee"


class Nvml(ModuleType):
    """Four GPUs; the values of handle i depend on i. `broken`: (function, handle) → error code."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.broken: dict[tuple[str, Any], int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def answer(self, function: str, handle: Any, value: Any) -> Any:
        if handle == SLICE and function in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if (function, handle) in self.broken:
            raise pynvml.NVMLError(self.broken[function, handle])
        return value

    def nvmlInit(self) -> None:
        self.answer("nvmlInit", None, None)

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return self.answer("nvmlDeviceGetHandleByIndex", index, index + 100)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != SLICE:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return SLICE

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return self.answer("nvmlDeviceGetUUID", handle, UUIDS[handle - 100])

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return self.answer("nvmlDeviceGetUtilizationRates", handle, SimpleNamespace(gpu=90, memory=40))

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return self.answer("nvmlDeviceGetMemoryInfo", handle, SimpleNamespace(used=5 * 10**9))

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self.answer("nvmlDeviceGetPowerUsage", handle, 350500)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self.answer("nvmlDeviceGetTemperature", handle, 60)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    stand_in = Nvml()
    assert all(hasattr(pynvml, name) for name in vars(Nvml) if name.startswith("nvml"))
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)
    return stand_in


def fail_on_error(error: str) -> None:
    raise AssertionError(f"no error was expected: {error}")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, [100, 101, 102, 103]),
        ("2,0", [102, 100]),
        (" 1 , 3 ", [101, 103]),
        ("", []),
        ("0,-1,1", [100]),  # as in CUDA, entries after an invalid one are ignored
        ("0,7,1", [100]),
        ("GPU-33333333-cccc,GPU-11", [102, 100]),  # shortened, but unambiguous
        ("GPU-1", []),  # ambiguous: two UUIDs start with it
        (SLICE, [SLICE]),
        ("MIG-nobody", []),
    ],
)
def test_the_gpus_that_cuda_shows_in_its_order(words: str | None, expected: list[Any], nvml: Nvml) -> None:
    assert NvidiaLibrary({} if words is None else {"CUDA_VISIBLE_DEVICES": words}).devices == expected


def test_torch_reads_these_numbers_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import _parse_visible_devices

    for words in ("0", "3,1", "1,-1,2", "", "0, 2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", words)
        assert visible_devices(words, range(4)) == _parse_visible_devices()


def test_the_figures_of_a_gpu(nvml: Nvml) -> None:
    assert NvidiaLibrary({}).read_figures(101, fail_on_error) == [90, 5, 350.5, 60]


def test_figures_that_a_slice_of_a_gpu_lacks_are_no_error(nvml: Nvml) -> None:
    assert NvidiaLibrary({"CUDA_VISIBLE_DEVICES": SLICE}).read_figures(SLICE, fail_on_error) == [None, 5, None, 60]


def test_a_gpu_that_falls_off_the_bus_while_others_stay(nvml: Nvml) -> None:
    library, errors = NvidiaLibrary({}), []
    for name in ("UtilizationRates", "MemoryInfo", "PowerUsage", "Temperature"):
        nvml.broken[f"nvmlDeviceGet{name}", 102] = pynvml.NVML_ERROR_GPU_IS_LOST
    assert library.read_figures(102, errors.append) == [None] * 4
    assert set(errors) == {"GPU is lost"} and library.read_figures(103, fail_on_error) == [90, 5, 350.5, 60]


def test_a_gpu_that_cannot_be_reached_keeps_its_place(nvml: Nvml) -> None:
    nvml.broken["nvmlDeviceGetHandleByIndex", 1] = pynvml.NVML_ERROR_NO_PERMISSION
    assert NvidiaLibrary({}).devices == [100, None, 102, 103]
    assert NvidiaLibrary({"CUDA_VISIBLE_DEVICES": "GPU-33,1"}).devices == [102, None]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has the driver")
def test_without_a_driver_the_real_library_says_why() -> None:
    with pytest.raises(NoGpuLibrary, match="NVML Shared Library Not Found"):
        NvidiaLibrary({})
    with pytest.raises(NoGpuLibrary, match=r"NVML Shared Library Not Found, .*amdsmi"):
        gpus.open_library({})


def test_a_driver_that_fails(nvml: Nvml) -> None:
    nvml.broken["nvmlInit", None] = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    with pytest.raises(NoGpuLibrary, match="version mismatch"):
        NvidiaLibrary({})


class AmdSmiException(Exception):
    pass


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for AMD SMI with two GPUs, which HIP numbers in reverse order.

    The second one reports no mean power.
    """
    module: Any = ModuleType("amdsmi")
    module.AmdSmiException = AmdSmiException
    module.amdsmi_init = lambda: None
    module.amdsmi_get_processor_handles = lambda: ["a", "b"]
    module.amdsmi_get_gpu_enumeration_info = lambda gpu: {"hip_id": {"a": 1, "b": 0}[gpu], "hip_uuid": "N/A"}
    module.amdsmi_get_gpu_activity = lambda gpu: {"gfx_activity": 80, "umc_activity": 10, "mm_activity": "N/A"}
    module.amdsmi_get_gpu_vram_usage = lambda gpu: {"vram_total": 65520, "vram_used": 1024}
    powers = {"a": (300, "N/A"), "b": ("N/A", 410)}
    keys = ("average_socket_power", "current_socket_power")
    module.amdsmi_get_power_info = lambda gpu: dict(zip(keys, powers[gpu], strict=True))
    module.amdsmi_get_temp_metric = lambda gpu, kind, metric: {"junction now": 55}[f"{kind} {metric}"]
    module.AmdSmiTemperatureType = SimpleNamespace(JUNCTION="junction")
    module.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="now")
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    return module


def test_amd_gpus_are_in_the_order_of_hip(smi: ModuleType) -> None:
    library = AmdLibrary({})
    assert library.devices == ["b", "a"]
    assert library.read_figures("a", fail_on_error) == [80, pytest.approx(1.073741824), 300, 55]
    assert library.read_figures("b", fail_on_error)[2] == 410
    assert AmdLibrary({"ROCR_VISIBLE_DEVICES": "1"}).devices == ["a"]
    assert AmdLibrary({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1"}).devices == ["b"]
    assert AmdLibrary({"CUDA_VISIBLE_DEVICES": "1"}).devices == ["a"]


def test_unknown_and_failing_figures_of_an_amd_gpu(smi: Any) -> None:
    def fails(gpu: str) -> dict[str, Any]:
        raise AmdSmiException("AMDSMI_STATUS_BUSY")

    smi.amdsmi_get_gpu_activity = lambda gpu: {"gfx_activity": "N/A"}
    smi.amdsmi_get_power_info = fails
    errors: list[str] = []
    assert AmdLibrary({}).read_figures("a", errors.append)[::2] == [None, None] and errors == ["AMDSMI_STATUS_BUSY"]


@pytest.mark.parametrize("error", [OSError("libamd_smi.so"), KeyError("ROCM_PATH"), AmdSmiException("no driver")])
def test_amds_package_may_fail_in_its_own_ways(error: Exception, smi: Any) -> None:
    def fails() -> None:
        raise error

    smi.amdsmi_init = fails
    with pytest.raises(NoGpuLibrary):
        AmdLibrary({})


def test_nvidia_comes_first_then_amd(smi: ModuleType, nvml: Nvml) -> None:
    kinds: list[Callable[..., Any]] = [type(gpus.open_library({}))]
    nvml.broken["nvmlInit", None] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert [*kinds, type(gpus.open_library({}))] == [NvidiaLibrary, AmdLibrary]
