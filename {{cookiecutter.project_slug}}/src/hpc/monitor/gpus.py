"""What a node's GPUs do, asked of the driver: no context on a GPU, none of its memory, no torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

METRICS = ("percent", "memory_gb", "watts", "celsius")
Reading = list[float | None]  # in that order; None: not known


class Missing(Exception):
    """Nothing on this node tells about its GPUs; the message says why."""


def found(environ: Mapping[str, str]) -> "Nvidia | Amd":
    """What tells about the GPUs of this node. Raises `Missing`."""
    why = []
    for library in (Nvidia, Amd):
        try:
            return library(environ)
        except Missing as missing:
            why.append(str(missing))
    raise Missing(", ".join(why))


def chosen(words: str | None, there: Sequence[Any], named: Callable[[str], Any] = lambda word: None) -> list[Any]:
    """Those of the devices that a variable such as CUDA_VISIBLE_DEVICES lets a program see, in its order.

    Args:
        words: numbers and names with commas between them; None: all devices. From the first that is none on, CUDA sees
            nothing.
        named: the device of this name, or None.
    """
    if words is None:
        return list(there)
    seen = []
    for word in map(str.strip, words.split(",")):
        if word.isdecimal() and int(word) < len(there):
            seen.append(there[int(word)])
        elif (device := named(word)) is not None:
            seen.append(device)
        else:
            break
    return seen


class Nvidia:
    """By NVML. `devices`: in torch's order; None: cannot be reached."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            import pynvml
        except ImportError as error:  # an image may do without it
            raise Missing(str(error)) from None
        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
            there = [self._handle(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise Missing(str(error)) from None
        self.devices = chosen(environ.get("CUDA_VISIBLE_DEVICES"), there, lambda word: self._named(word, there))

    def read(self, device: Any, said: Callable[[str], object]) -> Reading:
        """Of one GPU. `said` is told what goes wrong; what a GPU (a slice of one, say) does not count is no news."""
        nvml = self._nvml
        asks: list[Callable[[], float]] = [
            lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu,
            lambda: nvml.nvmlDeviceGetMemoryInfo(device).used / 1e9,
            lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        ]
        return [self._told(ask, said) for ask in asks]

    def _told(self, ask: Callable[[], float], said: Callable[[str], object]) -> float | None:
        try:
            return float(ask())
        except self._nvml.NVMLError as error:
            if error.value != self._nvml.NVML_ERROR_NOT_SUPPORTED:
                said(str(error))
            return None

    def _handle(self, index: int) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError:
            return None

    def _named(self, word: str, there: Sequence[Any]) -> Any:
        """The GPU with this UUID, which may be shortened, or the slice of one with this UUID (MIG)."""
        nvml = self._nvml
        try:
            if word.startswith("MIG-"):
                return nvml.nvmlDeviceGetHandleByUUID(word)
            found = [device for device in there if device and nvml.nvmlDeviceGetUUID(device).startswith(word)]
        except nvml.NVMLError:
            return None
        return found[0] if len(found) == 1 and word.startswith("GPU-") else None


class Amd:
    """By AMD SMI, whose Python package comes with ROCm. It writes N/A for what it does not know."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        try:
            import amdsmi  # pyright: ignore[reportMissingImports]

            self._smi: Any = amdsmi
            amdsmi.amdsmi_init()
            there = sorted(amdsmi.amdsmi_get_processor_handles(), key=self._hip_id)
        except Exception as error:  # the package looks for its library in its own ways, and fails in as many
            raise Missing(str(error)) from None
        # The runtime below HIP hides devices first; HIP counts what is left.
        left = chosen(environ.get("ROCR_VISIBLE_DEVICES"), there)
        self.devices = chosen(environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")), left)

    def read(self, device: Any, said: Callable[[str], object]) -> Reading:
        smi = self._smi
        asks: list[Callable[[], Any]] = [
            lambda: smi.amdsmi_get_gpu_activity(device)["gfx_activity"],
            lambda: smi.amdsmi_get_gpu_vram_usage(device)["vram_used"] * 2**20 / 1e9,
            lambda: self._watts(smi.amdsmi_get_power_info(device)),
            lambda: smi.amdsmi_get_temp_metric(
                device, smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
            ),
        ]
        return [self._told(ask, said) for ask in asks]

    def _told(self, ask: Callable[[], Any], said: Callable[[str], object]) -> float | None:
        try:
            value = ask()
        except (self._smi.AmdSmiException, TypeError, KeyError) as error:
            said(str(error))
            return None
        return float(value) if isinstance(value, int | float) else None

    @staticmethod
    def _watts(info: Mapping[str, Any]) -> Any:
        """Older GPUs tell a mean, newer ones what is drawn now."""
        mean = info["average_socket_power"]
        return mean if isinstance(mean, int) else info["current_socket_power"]

    def _hip_id(self, device: Any) -> int:
        try:
            return int(self._smi.amdsmi_get_gpu_enumeration_info(device)["hip_id"])
        except (AttributeError, self._smi.AmdSmiException, KeyError, ValueError):
            return 0  # an older library: as it lists them
