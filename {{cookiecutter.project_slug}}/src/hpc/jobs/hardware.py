"""What GPUs and networks can do, as hardware.yaml holds it. Imports no torch."""

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hpc.config.errors import ConfigError, closest_word

VENDORS = ("NVIDIA ", "AMD ", "Tesla ")
FILE = Path(__file__).with_name("hardware.yaml")
ARITHMETIC = {"bf16": "bf16", "16": "fp16", "32": "fp32", "64": "fp64"}  # by the first word of trainer.precision


@dataclass(frozen=True)
class GPU:
    """One device as torch counts them. hardware.yaml explains."""

    name: str
    memory_gb: float
    tflops: dict[str, float]
    bandwidth_gbs: float
    link_gbs: float
    matmul_share: float
    attention_share: float
    fixed_gb: float

    def peak(self, precision: str, tf32: bool = False) -> float | None:
        """FLOP/s at best in the Trainer's precision; None where it is not known."""
        kind = ARITHMETIC.get(precision.split("-")[0], "")
        if kind == "fp32" and tf32 and "tf32" in self.tflops:
            kind = "tf32"
        return self.tflops[kind] * 1e12 if kind in self.tflops else None


@dataclass(frozen=True)
class Network:
    """What rings reach of the nominal bandwidth, and how long their steps take at least. hardware.yaml explains."""

    link_share: float
    share: float
    hidden: float
    start: float
    link_hop: float
    hop: float


@dataclass(frozen=True)
class Eager:
    """What operations cost beside their work, and what torch.compile saves."""

    memory_share: float
    launch: float
    fused: float


@dataclass(frozen=True)
class Machine:
    """What a run runs on. `node_gbs`: GB/s that a node sends, nominal; None: not known, ask for one node only."""

    gpu: GPU
    node_gbs: float | None
    network: Network
    eager: Eager
    tf32: bool = True  # fp32 is multiplied as TF32 where the GPU can


def machine(name: str, node_gbs: float | None, link_gbs: float | None = None, tf32: bool = True) -> Machine:
    """Return the machine of a cluster file's gpu, network_gbs and gpu_link_gbs, or raise `ConfigError`."""
    for key, value in (("network_gbs", node_gbs), ("gpu_link_gbs", link_gbs)):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(
                f"cluster.{key}", value, "is GB/s, a number above 0", f"cluster.{key}=null, where it is not known"
            )
    found = gpu(name)
    found = found if link_gbs is None else replace(found, link_gbs=link_gbs)
    return Machine(found, node_gbs, Network(**_known()["network"]), Eager(**_known()["eager"]), tf32)


def gpu(name: str) -> GPU:
    """The GPU that a cluster file names. Raises `ConfigError` for one that hardware.yaml does not have."""
    known = _known()["gpus"]
    exactly = [one for one in known if one.casefold() == name.casefold()]
    if exactly:
        return GPU(exactly[0], **known[exactly[0]])
    if name.startswith(VENDORS) and (found := find(name)):  # what torch calls it
        return found
    rule = f"hpc/jobs/hardware.yaml knows {', '.join(known)}"
    typed = {one.casefold(): one for one in known}
    meant = typed[closest_word(name.casefold(), typed, next(iter(typed)))]
    raise ConfigError(
        "cluster.gpu", name, rule, f"cluster.gpu={repr(meant) if ' ' in meant else meant}, or add it there"
    )


def find(device: str) -> GPU | None:
    """The GPU of a device that torch names so, as "NVIDIA H100 80GB HBM3": the longest name that is a part of it."""
    known = _known()["gpus"]
    fits = [name for name in known if re.search(rf"(?i)(?<!\w){re.escape(name)}(?!\w)", device)]
    return GPU(name := max(fits, key=len), **known[name]) if fits else None


def peak(device: str, precision: str, tf32: bool = False) -> float | None:
    """FLOP/s of one device at best; None where it is not known.

    Args:
        device: its name, as torch gives it.
        precision: the Trainer's.
        tf32: may matrix products of fp32 be rounded to TF32?
    """
    found = find(device)
    return found.peak(precision, tf32) if found else None


@cache
def _known() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C where there is one: fifteen times as fast
    return yaml.load(FILE.read_text(encoding="utf-8"), loader)
