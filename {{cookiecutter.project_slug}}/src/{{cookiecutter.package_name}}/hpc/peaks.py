"""What devices can do at best, for the share of it that training reaches (MFU). Imports no torch.

Dense, without sparsity, in TFLOP/s, as the makers publish it: NVIDIA's data sheets of V100, A100, A40, L4, L40S,
H100 (SXM, PCIe, NVL), H200, GH200 and HGX B200; AMD's of MI250X (half: torch sees each of its two dies) and MI300.
"""

# A part of the name that torch gives a device, the longest that fits: peak by kind of arithmetic.
PEAKS: dict[str, dict[str, float]] = {
    "V100": {"fp16": 125.0, "fp32": 15.7, "fp64": 7.8},
    "A100": {"bf16": 312.0, "fp16": 312.0, "tf32": 156.0, "fp32": 19.5, "fp64": 19.5},
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "L4": {"bf16": 121.0, "fp16": 121.0, "tf32": 60.0, "fp32": 30.3},
    "L40S": {"bf16": 362.0, "fp16": 362.0, "tf32": 183.0, "fp32": 91.6},
    "H100": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    "H100 PCIe": {"bf16": 756.0, "fp16": 756.0, "tf32": 378.0, "fp32": 51.0, "fp64": 51.0},
    "H100 NVL": {"bf16": 835.0, "fp16": 835.0, "tf32": 417.5, "fp32": 60.0, "fp64": 60.0},
    "H200": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    "GH200": {"bf16": 989.4, "fp16": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9},
    "B200": {"bf16": 2250.0, "fp16": 2250.0, "tf32": 1125.0, "fp32": 75.0, "fp64": 37.0},
    "MI250X": {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9, "fp64": 47.9},
    "MI300X": {"bf16": 1307.4, "fp16": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp64": 163.4},
    "MI300A": {"bf16": 980.6, "fp16": 980.6, "tf32": 490.3, "fp32": 122.6, "fp64": 122.6},
}
ARITHMETIC = {"bf16": "bf16", "16": "fp16", "32": "fp32", "64": "fp64"}  # by the first word of trainer.precision


def peak(device: str, precision: str, tf32: bool = False) -> float | None:
    """FLOP/s of one device at best; None where it is not known.

    Args:
        device: its name, as in "NVIDIA H100 80GB HBM3".
        precision: the Trainer's.
        tf32: may matrix products of fp32 be rounded to TF32?
    """
    fits = max((name for name in PEAKS if name.lower() in device.lower()), key=len, default=None)
    kind = ARITHMETIC.get(precision.split("-")[0], "")
    if fits is None:
        return None
    if kind == "fp32" and tf32:
        kind = "tf32" if "tf32" in PEAKS[fits] else kind
    tera = PEAKS[fits].get(kind)
    return tera * 1e12 if tera else None
