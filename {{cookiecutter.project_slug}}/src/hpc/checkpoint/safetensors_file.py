"""Write tensors as one safetensors file, one of them in memory at a time. No torch before the first is read."""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from hpc.config.errors import ConfigError

if TYPE_CHECKING:
    from hpc.checkpoint.weights import Saved

# The format's names for torch's dtypes, widest first. It has no others that weights come in.
DTYPES = {
    "float64": "F64", "int64": "I64", "float32": "F32", "int32": "I32", "bfloat16": "BF16", "float16": "F16",
    "int16": "I16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write(tensors: Mapping[str, "Saved"], out: Path, *, notes: Mapping[str, str]) -> int:
    """Write tensor after tensor, aside and then renamed; return the number of bytes.

    The format knows no two names for one tensor: tied parameters are written under both, so that the file loads into
    any program, whichever name it asks for.

    Args:
        notes: what the file says about itself.

    Raises:
        ConfigError: a tensor cannot be read or has no place in the format, or the file cannot be written.
    """
    # The widest first: so each begins at a multiple of its elements' size.
    order = sorted(tensors, key=lambda name: (_rank(name, tensors[name]), name))
    header: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for name in order:
        saved, start = tensors[name], end
        end += prod(saved.shape) * saved.dtype.itemsize
        dtype = DTYPES[str(saved.dtype).removeprefix("torch.")]
        header[name] = {"dtype": dtype, "shape": list(saved.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with aside.open("xb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                stream.write(_bytes(tensors[name]))
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(out)
    except OSError as error:
        raise ConfigError("OUT", out, str(error.strerror or error), "a file in a directory with room for it") from None
    finally:
        aside.unlink(missing_ok=True)
    return 8 + len(text) + end


def _rank(name: str, saved: "Saved") -> int:
    dtype = str(saved.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError("RUN_DIR", saved.path, f"{name!a} is of type {dtype}", f"one of {', '.join(DTYPES)}")
    return list(DTYPES).index(dtype)


def _bytes(saved: "Saved") -> memoryview:
    import torch

    tensor = saved.read()
    if (tensor.dtype, tensor.shape) != (saved.dtype, saved.shape):
        raise ConfigError("RUN_DIR", saved.path, "is damaged: a tensor is not as announced", "another checkpoint")
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
