"""Write tensors as one safetensors file, one of them in memory at a time. torch is imported with the first one.

`save_file` of the safetensors library (0.8.0) wants all tensors in memory at once, and rejects tied ones.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from hpc.config.errors import ConfigError
from hpc.system.files import complete_file

if TYPE_CHECKING:
    from hpc.checkpoint.weights import SavedTensor

# The format's names for torch's dtypes, widest first. It has no others that weights come in.
DTYPES = {
    "float64": "F64", "int64": "I64", "float32": "F32", "int32": "I32", "bfloat16": "BF16", "float16": "F16",
    "int16": "I16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write(tensors: Mapping[str, "SavedTensor"], out: Path, *, notes: Mapping[str, str]) -> int:
    """Write the tensors one after the other, into a temporary file that is renamed; return the number of bytes.

    The format has no second names: tied parameters are written under both names, so that the file loads into any
    program, whichever name it uses.

    Args:
        notes: the metadata of the file.

    Raises:
        ConfigError: a tensor cannot be read, the format lacks its type, or the file cannot be written.
    """
    # The widest first, so that each tensor begins at a multiple of its elements' size.
    order = sorted(tensors, key=lambda name: (_dtype_order(name, tensors[name]), name))
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name in order:
        saved, start = tensors[name], end
        end += prod(saved.shape) * saved.dtype.itemsize
        dtype = DTYPES[str(saved.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(saved.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    try:
        with complete_file(out, is_durable=True) as temporary, temporary.open("xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                stream.write(_read_bytes(tensors[name]))
    except OSError as error:
        rule, given = "must be a file that can be written", f"{out} ({error.strerror or error})"
        raise ConfigError("OUT", given, rule, "a file in a directory with space for it") from None
    return 8 + len(text) + end


def _dtype_order(name: str, saved: "SavedTensor") -> int:
    dtype = str(saved.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        rule = f"must hold tensors of these types only: {', '.join(DTYPES)}; {name!a} is of type {dtype}"
        raise ConfigError("RUN_DIR", saved.path, rule, "a model whose weights are of these types")
    return list(DTYPES).index(dtype)


def _read_bytes(saved: "SavedTensor") -> memoryview:
    import torch

    tensor = saved.read()
    if (tensor.dtype, tensor.shape) != (saved.dtype, saved.shape):
        raise ConfigError(
            "RUN_DIR",
            saved.path,
            "cannot be exported, as it is damaged: a tensor has another type or shape than noted",
            "another checkpoint",
        )
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
