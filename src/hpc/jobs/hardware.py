"""Facts of GPUs and networks, as hardware.yaml lists them. Imports no torch."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hpc.config.errors import ConfigError, closest_word

VENDOR_PREFIXES = ("NVIDIA ", "AMD ", "Tesla ")
HARDWARE_FILE = Path(__file__).with_name("hardware.yaml")
ARITHMETIC_OF_PRECISION = {"bf16": "bf16", "16": "fp16", "32": "fp32", "64": "fp64"}  # first part of trainer.precision


@dataclass(frozen=True)
class GPU:
    """One device as torch counts them. The comments of hardware.yaml define the fields."""

    name: str
    memory_gb: float
    tflops: dict[str, float]
    bandwidth_gbs: float
    link_gbs: float
    matmul_share: float
    attention_share: float
    fixed_gb: float

    def peak_flops(self, precision: str, *, tf32: bool = False) -> float | None:
        """Return the peak in FLOP/s for the Trainer's precision; None if it is not known."""
        arithmetic = ARITHMETIC_OF_PRECISION.get(precision.split("-")[0], "")
        if arithmetic == "fp32" and tf32 and "tf32" in self.tflops:
            arithmetic = "tf32"
        return self.tflops[arithmetic] * 1e12 if arithmetic in self.tflops else None


@dataclass(frozen=True)
class CollectiveEfficiency:
    """Shares of the nominal bandwidth that ring collectives reach, and their latencies. See hardware.yaml."""

    link_share: float
    node_share: float
    overlap_share: float
    start_seconds: float
    link_hop_seconds: float
    node_hop_seconds: float


@dataclass(frozen=True)
class OperationCosts:
    """Costs of operations other than matrix products, and what torch.compile saves. See hardware.yaml."""

    memory_share: float
    launch_seconds: float
    fused_share: float


@dataclass(frozen=True)
class Machine:
    """The hardware that a run uses.

    Attributes:
        node_gbs: nominal GB/s that a node sends; None if unknown, then plans are for one node only.
        node_memory_gb: main memory of a node; None if unknown.
        tf32: whether fp32 matrix products are computed in TF32 where the GPU can.
    """

    gpu: GPU
    node_gbs: float | None
    network: CollectiveEfficiency
    operations: OperationCosts
    tf32: bool = True
    node_memory_gb: float | None = None


def machine_from_cluster(
    gpu_name: str, node_gbs: float | None, *, link_gbs: float | None = None, tf32: bool = True
) -> Machine:
    """Return the machine of a cluster file's gpu, network_gbs and gpu_link_gbs.

    Raises:
        ConfigError: the GPU is unknown, or a bandwidth is not above 0.
    """
    for key, value in (("network_gbs", node_gbs), ("gpu_link_gbs", link_gbs)):
        if value is not None and not 0 < value < float("inf"):
            rule = "must be a number above 0, in GB/s"
            raise ConfigError(f"cluster.{key}", value, rule, f"cluster.{key}=null if it is unknown")
    gpu = gpu_from_config_name(gpu_name)
    if link_gbs is not None:
        gpu = replace(gpu, link_gbs=link_gbs)
    facts = _read_hardware()
    return Machine(gpu, node_gbs, CollectiveEfficiency(**facts["network"]), OperationCosts(**facts["operations"]), tf32)


def gpu_from_config_name(name: str) -> GPU:
    """Return the GPU that a cluster file names. Raise `ConfigError` if hardware.yaml does not list it."""
    gpus = _read_hardware()["gpus"]
    spelling = {listed.casefold(): listed for listed in gpus}
    if listed := spelling.get(name.casefold()):
        return GPU(listed, **gpus[listed])
    if name.startswith(VENDOR_PREFIXES) and (gpu := gpu_from_device_name(name)):  # the name that torch reports
        return gpu
    rule = f"must be one of the GPUs in hpc/jobs/hardware.yaml ({', '.join(gpus)})"
    closest = spelling[closest_word(name.casefold(), spelling, next(iter(spelling)))]
    quoted = repr(closest) if " " in closest else closest
    raise ConfigError("cluster.gpu", name, rule, f"cluster.gpu={quoted}, or add your GPU to that file")


def gpu_from_device_name(device_name: str) -> GPU | None:
    """Return the GPU whose name is the longest that occurs in `device_name`, e.g. "NVIDIA H100 80GB HBM3".

    A slice of a GPU, such as "NVIDIA A100-SXM4-40GB MIG 1g.5gb", is not that GPU.
    """
    gpus, slice_word = _read_hardware()["gpus"], re.compile(r"\bMIG\b")
    matches = [name for name in gpus if re.search(rf"(?i)(?<!\w){re.escape(name)}(?!\w)", device_name)]
    matches = [name for name in matches if slice_word.search(name) or not slice_word.search(device_name)]
    return GPU(name := max(matches, key=len), **gpus[name]) if matches else None


def names_of_type(gpu_type: str) -> list[str]:
    """Return the names in hardware.yaml that a scheduler's type of GPU may stand for: several for "a100"."""
    words = set(re.split(r"[\W_]+", gpu_type.casefold()))
    return [name for name in _read_hardware()["gpus"] if words <= set(re.split(r"[\W_]+", name.casefold()))]


def peak_flops(device_name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Return the peak of one device in FLOP/s; None if it is not known.

    Args:
        device_name: as torch reports it.
        precision: the Trainer's.
        tf32: whether fp32 matrix products may be rounded to TF32.
    """
    gpu = gpu_from_device_name(device_name)
    return gpu.peak_flops(precision, tf32=tf32) if gpu else None


@cache
def _read_hardware() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is fifteen times as fast
    return yaml.load(HARDWARE_FILE.read_text(encoding="utf-8"), loader)
