"""Figures of a node's GPUs from the driver, without a context on a GPU, without its memory, without torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

METRICS = ("percent", "memory_gb", "watts", "celsius")
GpuFigures = list[float | None]  # in the order of METRICS; None: unknown


class NoGpuLibrary(Exception):
    """No library of this node gives figures of its GPUs; the message says why."""


def open_library(environ: Mapping[str, str]) -> "NvidiaLibrary | AmdLibrary":
    """Return the library that gives figures of this node's GPUs. Raises `NoGpuLibrary`."""
    reasons = []
    for library in (NvidiaLibrary, AmdLibrary):
        try:
            return library(environ)
        except NoGpuLibrary as error:
            reasons.append(str(error))
    raise NoGpuLibrary(", ".join(reasons))


def visible_devices(
    words: str | None, devices: Sequence[Any], *, by_name: Callable[[str], Any] = lambda name: None
) -> list[Any]:
    """Return the devices that a variable such as CUDA_VISIBLE_DEVICES lets a program see, in its order.

    Args:
        words: numbers and names, separated by commas; None: all devices. CUDA ignores all that follows an invalid word.
        by_name: returns the device of a name, or None.
    """
    if words is None:
        return list(devices)
    visible = []
    for word in map(str.strip, words.split(",")):
        if word.isdecimal() and int(word) < len(devices):
            visible.append(devices[int(word)])
        elif (device := by_name(word)) is not None:
            visible.append(device)
        else:
            break
    return visible


class NvidiaLibrary:
    """NVML. `devices` are in torch's order; None is a GPU that cannot be reached."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            import pynvml
        except ImportError as error:  # a container image may lack it
            raise NoGpuLibrary(str(error)) from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            handles = [self._handle(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise NoGpuLibrary(str(error)) from None
        words = environ.get("CUDA_VISIBLE_DEVICES")
        self.devices = visible_devices(words, handles, by_name=lambda name: self._find(name, handles))

    def read_figures(self, device: Any, report_error: Callable[[str], object]) -> GpuFigures:
        """Return the figures of one GPU.

        Errors go to `report_error`, but for figures that this kind of GPU (a slice of one, say) does not have.
        """
        nvml = self._nvml
        queries: list[Callable[[], float]] = [
            lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu,
            lambda: nvml.nvmlDeviceGetMemoryInfo(device).used / 1e9,
            lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        ]
        return [self._figure(query, report_error) for query in queries]

    def _figure(self, query: Callable[[], float], report_error: Callable[[str], object]) -> float | None:
        try:
            return float(query())
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_NOT_SUPPORTED:
                report_error(str(error))
            return None

    def _handle(self, index: int) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError:
            return None

    def _find(self, name: str, handles: Sequence[Any]) -> Any:
        """Return the GPU with this UUID, which may be shortened, or the slice of a GPU (MIG) with this UUID."""
        nvml = self._nvml
        try:
            if name.startswith("MIG-"):
                return nvml.nvmlDeviceGetHandleByUUID(name)
            matches = [handle for handle in handles if handle and nvml.nvmlDeviceGetUUID(handle).startswith(name)]
        except nvml.NVMLError:
            return None
        return matches[0] if len(matches) == 1 and name.startswith("GPU-") else None


class AmdLibrary:
    """AMD SMI, whose Python package comes with ROCm. It writes N/A for figures that it does not know."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            import amdsmi  # pyright: ignore[reportMissingImports]

            self._smi: Any = amdsmi
            amdsmi.amdsmi_init()
            handles = sorted(amdsmi.amdsmi_get_processor_handles(), key=self._hip_id)
        except Exception as error:  # the package searches for its library in several ways, with an error for each
            raise NoGpuLibrary(str(error)) from None
        # The runtime below HIP hides devices first; HIP numbers the remaining ones.
        of_runtime = visible_devices(environ.get("ROCR_VISIBLE_DEVICES"), handles)
        words = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
        self.devices = visible_devices(words, of_runtime)

    def read_figures(self, device: Any, report_error: Callable[[str], object]) -> GpuFigures:
        """Return the figures of one GPU; errors go to `report_error`."""
        smi = self._smi
        queries: list[Callable[[], Any]] = [
            lambda: smi.amdsmi_get_gpu_activity(device)["gfx_activity"],
            lambda: smi.amdsmi_get_gpu_vram_usage(device)["vram_used"] * 2**20 / 1e9,
            lambda: self._watts(smi.amdsmi_get_power_info(device)),
            lambda: smi.amdsmi_get_temp_metric(
                device, smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
            ),
        ]
        return [self._figure(query, report_error) for query in queries]

    def _figure(self, query: Callable[[], Any], report_error: Callable[[str], object]) -> float | None:
        try:
            value = query()
        except (self._smi.AmdSmiException, TypeError, KeyError) as error:
            report_error(str(error))
            return None
        return float(value) if isinstance(value, int | float) else None

    @staticmethod
    def _watts(info: Mapping[str, Any]) -> Any:
        """Return the mean power, which older GPUs give, or the current power, which newer ones give."""
        mean = info["average_socket_power"]
        return mean if isinstance(mean, int) else info["current_socket_power"]

    def _hip_id(self, device: Any) -> int:
        try:
            return int(self._smi.amdsmi_get_gpu_enumeration_info(device)["hip_id"])
        except (AttributeError, self._smi.AmdSmiException, KeyError, ValueError):
            return 0  # an older library: keep its order
